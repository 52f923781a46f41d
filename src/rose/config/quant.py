"""In which formats weights, activations and KV are held."""

from __future__ import annotations

from dataclasses import dataclass

from rose.utils.errors import ConfigError

ACTIVATION_FORMATS = ("auto", "bf16", "float32", "float64")
"""float64 is for tests."""
PROJECTION_FORMATS = ("bf16", "fp8_block")
KV_FORMATS = (*ACTIVATION_FORMATS, "fp8_e4m3")
WEIGHT_FORMATS = ("auto", "mxfp4", "bf16", "fp8_block", "fp8_block_all", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """Formats by name (see kernels/formats.py)."""

    weights: str = "auto"
    """Experts: mxfp4 keeps the checkpoint's; fp8_block converts; fp8_block_all also projections and head.
    auto: what the checkpoint holds. bf16 and float32 expand everything."""
    projections: str | None = None
    """Projections of attention, and the head: bf16, or fp8_block (half the bytes, and less exact:
    docs/numerics.md). None: what `weights` says."""
    activations: str = "auto"
    """bf16, or float32 (tests, CPU); auto: bf16 on CUDA, float32 on a CPU."""
    kv: str = "auto"
    """Format of the KV cache; auto: the activations'. fp8_e4m3: half the bytes of bf16, without scales, and less exact
    (docs/numerics.md)."""

    def __post_init__(self) -> None:
        problems = []
        if self.weights not in WEIGHT_FORMATS:
            problems.append(
                f"weights={self.weights!r} is not a format; allowed: {', '.join(WEIGHT_FORMATS)}; "
                "change quant.weights"
            )
        for name, value, formats in (
            ("activations", self.activations, ACTIVATION_FORMATS),
            ("kv", self.kv, KV_FORMATS),
        ):
            if value not in formats:
                problems.append(
                    f"{name}={value!r} is not a format; allowed: {', '.join(formats)}; change quant.{name}"
                )
        if self.projections not in (None, *PROJECTION_FORMATS):
            problems.append(
                f"projections={self.projections!r} is not a format; allowed: {', '.join(PROJECTION_FORMATS)}; "
                "change quant.projections"
            )
        if problems:
            raise ConfigError(problems)

    @property
    def projection_format(self) -> str:
        """Format of projections and head; bf16 where `weights` is still undecided."""
        decided = {"fp8_block_all": "fp8_block", "float32": "float32"}.get(self.weights, "bf16")
        return self.projections or decided

    @property
    def kv_element(self) -> str:
        """Type of the numbers in the KV cache, a name of utils/dtypes.py."""
        assert self.kv != "auto", "quant must be resolved first"
        return "e4m3" if self.kv == "fp8_e4m3" else self.kv
