"""A projection with torch operators: runs anywhere.

Wide activations take the reference as it is. bf16 with a bf16 matrix goes to torch's own product, which
accumulates in float32 but rounds before bias and residual are added; that costs two more roundings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.gemm.reference import reference
from rose.kernels.registry import Band, Implementation, register
from rose.kernels.weights import LinearWeights


def gemm(
    x_TK: Tensor, *, weights: LinearWeights, residual_TN: Tensor | None, out_TN: Tensor
) -> None:
    """Multiply by the matrix as it is stored, in float32 unless it is bf16 on a CUDA device."""
    is_native = x_TK.is_cuda and x_TK.dtype == weights.matrix.values.dtype == torch.bfloat16
    if not is_native or out_TN.dtype != torch.bfloat16:
        reference(x_TK, weights=weights, residual_TN=residual_TN, out_TN=out_TN)
        return
    y_TN = torch.nn.functional.linear(x_TK, weights.matrix.values).float()
    for term in (weights.bias_N, residual_TN):
        if term is not None:
            y_TN += term
    out_TN.copy_(y_TN)


register(
    Implementation(
        operation="gemm",
        name="torch",
        function=gemm,
        band=Band.PORTABLE,
        note="decodes the matrix in every call unless it is plain",
    )
)
