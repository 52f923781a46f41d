"""A checkpoint folder -> a model on the device. Knows no architecture: the registry does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rose.config.engine import EngineConfig
from rose.kernels.registry import require_implementations
from rose.layers.build import LayerBuild
from rose.models.base import CausalLM
from rose.models.registry import ModelEntry, entry
from rose.runtime.limits import context_limit, require_one_device
from rose.utils.device import DeviceFacts
from rose.utils.errors import CheckpointError
from rose.weights.loader import Progress
from rose.weights.reader import config_path, read_json


def load_model(
    config: EngineConfig, device: DeviceFacts, report: Callable[[str], None]
) -> tuple[CausalLM, EngineConfig]:
    """Read the checkpoint that the configuration names.

    Returns  the model, and the configuration resolved for device and checkpoint
    Raises   ConfigError, ContractError, CheckpointError
    """
    folder = Path(config.model)
    model_entry = find_architecture(folder)
    weights = model_entry.weights
    model_config = weights.read_config(folder)
    resolved = config.resolve(device, checkpoint_format=weights.checkpoint_format(folder))
    require_one_device(resolved.parallel)
    context_limit(resolved, model_config)
    require_implementations(resolved.kernels.only)
    report(f"loading weights of {folder}")
    parameters = weights.load(
        folder, model_config, resolved.quant, device=device.kind, progress=_progress(report)
    )
    report("binding kernels")
    model = model_entry.model(
        model_config,
        parameters,
        build=LayerBuild(quant=resolved.quant, device=device, kernels=resolved.kernels),
        page_tokens=resolved.cache.page_tokens,
        num_positions=resolved.context_tokens,
    )
    return model, resolved


def _progress(report: Callable[[str], None]) -> Progress:
    """Report each tenth of the weights once."""
    last = 0

    def progress(done: int, total: int, _name: str) -> None:
        nonlocal last
        tenth = 10 * done // max(1, total)
        if tenth > last:
            last = tenth
            report(f"loading weights: {done / 1e9:.1f} of {total / 1e9:.1f} GB")

    return progress


def find_architecture(folder: Path) -> ModelEntry:
    """Tell from config.json what builds the model.

    Raises  CheckpointError, ConfigError with the known names
    """
    path = config_path(folder)
    values = read_json(path)
    architecture = values.get("model_type")
    if architecture is None and "num_experts" in values and "swiglu_limit" in values:
        # OpenAI's `original/` layout names no architecture; it has only ever held gpt-oss.
        architecture = "gpt_oss"
    if not isinstance(architecture, str):
        raise CheckpointError(
            f"{path} has no model_type; needed: the name of the architecture; "
            "restore the file from the checkpoint's source"
        )
    return entry(architecture)
