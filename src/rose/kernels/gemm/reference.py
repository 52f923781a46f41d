"""A projection by its formula, in float32 (float64 stays float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.quantize_activation.reference import rounded
from rose.kernels.weights import LinearWeights


def reference(
    x_TK: Tensor, *, weights: LinearWeights, residual_TN: Tensor | None, out_TN: Tensor
) -> None:
    """Decode the matrix and multiply; see the contract."""
    wide = torch.float64 if x_TK.dtype == torch.float64 else torch.float32
    y_TN = x_TK.to(wide) @ weights.matrix.to_float(wide).T
    if weights.bias_N is not None:
        y_TN += weights.bias_N.to(wide)
    if residual_TN is not None:
        y_TN += residual_TN.to(wide)
    out_TN.copy_(y_TN)


def rounded_reference(
    rounding: tuple[str, ...],
    x_TK: Tensor,
    *,
    weights: LinearWeights,
    residual_TN: Tensor | None,
    out_TN: Tensor,
) -> None:
    """The same with x rounded to `rounding`: (of x,)."""
    (of_x,) = rounding
    x_TK = rounded(x_TK.float(), of_x)
    reference(x_TK, weights=weights, residual_TN=residual_TN, out_TN=out_TN)
