"""A projection: rows times a weight matrix, with bias and residual."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.registry import FormatNames, Operation, Sizes
from rose.kernels.weights import LinearWeights


def gemm(
    x_TK: Tensor, *, weights: LinearWeights, residual_TN: Tensor | None, out_TN: Tensor
) -> None:
    """Compute x W^T + bias (+ residual), accumulated in float32 and rounded once.

    Shapes   T tokens, K in, N out
             x_TK         activation dtype, rows contiguous (row stride may exceed K)
             weights      matrix [N, K] in any format, bias_N or None
             residual_TN  activation dtype, contiguous, or None; added before the one rounding
             out_TN       activation dtype or float32 (logits), contiguous
    Aliasing writes out_TN; residual_TN may be out_TN
    """


def _validate(_formats: FormatNames, sizes: Sizes) -> list[str]:
    return [
        f"{name} is {sizes[name]}, must be at least 1" for name in ("N", "K") if sizes[name] < 1
    ]


OPERATION = Operation(
    name="gemm",
    signature=gemm,
    sizes=("N", "K"),
    outputs=("out_TN",),
    formats=("activation", "weight"),
    validate=_validate,
)
