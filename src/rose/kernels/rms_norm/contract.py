"""Residual add and RMSNorm in one pass over the rows."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.registry import Operation


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, *, eps: float, residual_TD: Tensor | None, out_TD: Tensor
) -> None:
    """Add `x_TD` to the residual stream and normalise the sum.

    Shapes   T tokens, D hidden size
             x_TD         activation dtype, rows contiguous (row stride may exceed D)
             weight_D     float32
             residual_TD  activation dtype, contiguous; None: x itself is normalised and nothing is added
             out_TD       activation dtype, contiguous
    Aliasing writes out_TD; replaces residual_TD by round(residual + x). out_TD may be x_TD.
    Source   t = float32(sum rounded to the activation dtype); t * rsqrt(mean(t^2) + eps) * weight, one rounding.
    """


OPERATION = Operation(
    name="rms_norm",
    signature=rms_norm,
    sizes=("D",),
    outputs=("out_TD",),
    inouts=("residual_TD",),
    formats=("activation",),
)
