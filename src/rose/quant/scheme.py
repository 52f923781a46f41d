"""Which format each kind of weight is held in, decided once from the QuantConfig.

A role is a kind of weight (experts, projection, head, router, embedding, bias, norm, sinks). Layers and loaders
ask the scheme by role and contain no format names of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.config.quant import QuantConfig
from rose.kernels.formats import BF16, FLOAT32, FLOAT64, FORMATS, FP8_BLOCK, TensorFormat
from rose.utils.errors import ConfigError

ROLES = ("experts", "projection", "head", "router", "embedding", "bias", "norm", "sinks")

_ACTIVATIONS = {f.name: f for f in (BF16, FLOAT32, FLOAT64)}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantScheme:
    """Formats by role; norms and sinks are always float32, router and embedding follow the activations."""

    experts: TensorFormat
    projection: TensorFormat
    head: TensorFormat
    activations: TensorFormat

    def of_role(self, role: str) -> TensorFormat:
        """Return the format in which weights of this role are resident."""
        assert role in ROLES, f"role {role!r} is not one of {ROLES}"
        if role in ("norm", "sinks"):
            return FLOAT32
        if role in ("router", "embedding", "bias"):
            return self.activations
        return getattr(self, role)


def scheme(quant: QuantConfig) -> QuantScheme:
    """Read the formats off a resolved configuration node.

    Raises  ConfigError where `auto` is still undecided.
    """
    undecided = [n for n in ("weights", "activations") if getattr(quant, n) == "auto"]
    if undecided:
        raise ConfigError(
            [
                f"quant.{name} is still 'auto'; weights are loaded with a decided format; "
                "call EngineConfig.resolve first"
                for name in undecided
            ]
        )
    dense = FORMATS[quant.projection_format]
    experts = FP8_BLOCK if quant.weights == "fp8_block_all" else FORMATS[quant.weights]
    return QuantScheme(
        experts=experts,
        projection=dense,
        head=dense,
        activations=_ACTIVATIONS[quant.activations],
    )
