"""Architecture -> what builds it. A new model is one folder and one line here."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from rose.utils.errors import ConfigError

if TYPE_CHECKING:
    from rose.config.engine import EngineConfig
    from rose.config.model import ModelConfig
    from rose.models.base import CausalLM
    from rose.utils.device import DeviceFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One architecture; its modules are imported only when asked for.

    The folder holds `config` (a ModelConfig with `from_json`), `model` (a CausalLM), `parameters` (the tree
    of weights it takes), `weights` (names in checkpoints, rules, loading) and `reference` (the oracle).
    """

    architecture: str
    """`model_type` in config.json."""
    package: str
    config_class: str
    model_class: str

    def module(self, name: str) -> ModuleType:
        """Import one of the folder's files."""
        return importlib.import_module(f"{self.package}.{name}")

    @property
    def config(self) -> type:
        """Return the configuration class."""
        return getattr(self.module("config"), self.config_class)

    @property
    def model(self) -> type:
        """Return the model class: (config, parameters, *, build, page_tokens, num_positions)."""
        return getattr(self.module("model"), self.model_class)

    @property
    def weights(self) -> ModuleType:
        """Return the table of checkpoint names and rules, with `load`."""
        return self.module("weights")

    def dry_model(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        device: DeviceFacts,
        *,
        context_tokens: int,
    ) -> CausalLM:
        """Build the model with the kernels that the real one gets, but without numbers and memory.

        Where the device is there, this begins to compile CUDA sources.

        Units   config is resolved; context_tokens: the longest sequence that may come
        Raises  InvarianceError where the batch-invariant mode was asked for and kernels for it are missing
        """
        # Here, since it brings torch, which who asks for names alone may lack.
        from rose.layers.build import LayerBuild

        build = LayerBuild(
            quant=config.quant, device=device, kernels=config.kernels, dry_context=context_tokens
        )
        model = self.model(
            model_config,
            self.weights.blank(model_config, config.quant),
            build=build,
            page_tokens=config.cache.page_tokens,
            # Making the table of angles takes longer than all the rest here.
            num_positions=1,
        )
        build.require_invariant()
        return model


MODELS = {
    "gpt_oss": ModelEntry(
        architecture="gpt_oss",
        package="rose.models.gpt_oss",
        config_class="GptOssConfig",
        model_class="GptOss",
    ),
}


def entry(architecture: str) -> ModelEntry:
    """Return how to build an architecture.

    Raises  ConfigError with the known names.
    """
    if architecture not in MODELS:
        raise ConfigError(
            f"model architecture {architecture!r} is not known; supported: {', '.join(sorted(MODELS))}; "
            "choose another model folder, or add the architecture (docs/add_a_model.md)"
        )
    return MODELS[architecture]
