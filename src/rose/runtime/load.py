"""A checkpoint folder -> a model on the device. Knows no architecture: the registry does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rose.config.engine import EngineConfig
from rose.kernels.registry import require_implementations
from rose.layers.build import LayerBuild
from rose.models.base import CausalLM
from rose.models.registry import ModelEntry, entry
from rose.runtime.ahead import begin_ahead
from rose.runtime.before_load import Planner
from rose.runtime.limits import require_one_device
from rose.runtime.memory import MemoryPlan
from rose.utils.device import DeviceFacts, free_bytes
from rose.utils.errors import CheckpointError, InvarianceError
from rose.utils.log import get_logger
from rose.weights.loader import Progress
from rose.weights.reader import config_path, read_json

_logger = get_logger(__name__)
HELD_SECONDS = 10.0
"""A driver takes a second or two to give back what a killed process had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model on the device, and what was decided before it was there."""

    model: CausalLM
    config: EngineConfig
    """Resolved for device and checkpoint."""
    planned: MemoryPlan


def load_model(config: EngineConfig, device: DeviceFacts, report: Callable[[str], None]) -> Loaded:
    """Read the checkpoint that the configuration names, once it is known that it fits.

    Raises   ConfigError, ContractError, CheckpointError
    """
    try:
        return _load(config, device, report)
    except InvarianceError as error:
        if config.kernels.batch_invariant is not None:
            raise
        _logger.warning("%s; nobody asked for it, so it is off", error)
        kernels = replace(config.kernels, batch_invariant=False)
        return _load(replace(config, kernels=kernels), device, report)


def _load(config: EngineConfig, device: DeviceFacts, report: Callable[[str], None]) -> Loaded:
    folder = Path(config.model)
    model_entry = find_architecture(folder)
    weights = model_entry.weights
    model_config = weights.read_config(folder)
    resolved = config.resolve(device, checkpoint_format=weights.checkpoint_format(folder))
    require_one_device(resolved.parallel)
    require_implementations(resolved.kernels.only)
    planner = Planner(
        entry=model_entry,
        model_config=model_config,
        device=device,
        free_bytes=free_bytes(device),
        asked=config.scheduler,
    )
    planner = _when_free(planner, resolved, report)
    planned = planner.plan(resolved)
    for line in planner.lines(resolved, planned):
        _logger.info("%s", line)
    begin_ahead(model_config, resolved, device)
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
    return Loaded(model=model, config=resolved, planned=planned)


def _when_free(planner: Planner, config: EngineConfig, report: Callable[[str], None]) -> Planner:
    """Give a process that was killed a moment ago the time to lose its memory: this one may stand in for it."""
    deadline = time.monotonic() + HELD_SECONDS
    while planner.is_held(config) and time.monotonic() < deadline:
        report("waiting for memory that another process holds")
        time.sleep(0.5)
        planner = replace(planner, free_bytes=free_bytes(planner.device))
    return planner


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
