"""Rows to E4M3 with one scale per group of columns."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.registry import Operation


def quantize_activation(x_TD: Tensor, *, group: int, values_TD: Tensor, scales_TB: Tensor) -> None:
    """Quantise rows to E4M3.

    Shapes   T tokens, D columns, B = ceil(D / group)
             x_TD       bf16 or float32, rows contiguous
             values_TD  e4m3 [T, D], contiguous, unpadded
             scales_TB  float32 [T, B]; any strides (kernels may want the T axis contiguous)
    Units    scale = max(amax of the group, 1e-4) / 448; value = e4m3(x / scale), nearest even, clamped to
             +-448; the stored number is value * scale
    Aliasing writes values_TD and scales_TB
    """


OPERATION = Operation(
    name="quantize_activation",
    signature=quantize_activation,
    sizes=("D", "group"),
    outputs=("values_TD", "scales_TB"),
    formats=("activation",),
)
