"""A projection with torch operators: runs anywhere.

On CUDA a bf16 matrix goes to cuBLAS, which adds bias or residual to the float32 accumulators and rounds once;
with both, the bias is added in one more pass. Everything else takes the reference as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.gemm.reference import reference
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import LinearWeights


def gemm(
    x_TK: Tensor, *, weights: LinearWeights, residual_TN: Tensor | None, out_TN: Tensor
) -> None:
    """Multiply by the matrix as it is stored, in float32 unless it is bf16 on a CUDA device."""
    matrix_NK = weights.matrix.values
    is_native = x_TK.is_cuda and x_TK.dtype == matrix_NK.dtype == torch.bfloat16
    bias_N = None if weights.bias_N is None else weights.bias_N.to(torch.bfloat16)
    if not is_native or (out_TN.dtype != torch.bfloat16 and (bias_N, residual_TN) != (None, None)):
        reference(x_TK, weights=weights, residual_TN=residual_TN, out_TN=out_TN)
    elif out_TN.dtype == torch.float32:
        torch.mm(x_TK, matrix_NK.T, out_dtype=torch.float32, out=out_TN)
    elif residual_TN is None:
        if bias_N is None:
            torch.mm(x_TK, matrix_NK.T, out=out_TN)
        else:
            torch.addmm(bias_N, x_TK, matrix_NK.T, out=out_TN)
    else:
        torch.addmm(residual_TN, x_TK, matrix_NK.T, out=out_TN)
        if bias_N is not None:
            out_TN += bias_N


def workspace(sizes: Sizes, rows: int, _longest: int) -> int:
    """Bytes of a call that goes through float32: x, the decoded matrix and the product."""
    return 4 * (rows * (sizes["K"] + sizes["N"]) + sizes["N"] * sizes["K"])


register(
    Implementation(
        operation="gemm",
        name="torch",
        function=gemm,
        band=Band.PORTABLE,
        workspace=workspace,
        note="decodes the matrix in every call unless it is plain",
    )
)


def _limits(sizes: Sizes) -> str | None:
    if sizes["N"] < 4096:
        return f"N is {sizes['N']}; under 4096 rows two parts of the columns are faster"
    return None


register(
    Implementation(
        operation="gemm",
        name="torch_cublas",
        function=gemm,
        band=Band.SPECIALISED,
        device="cuda",
        min_capability=(9, 0),
        max_capability=(9, 0),
        formats={"activation": frozenset({"bf16"}), "weight": frozenset({"bf16"})},
        phases=frozenset({"decode"}),
        rows=(17, 512),
        limits=_limits,
        # H200, 32 and 128 tokens: 11.2 and 11.9 us for N 5120, where Triton takes 11.2 and 18.7; the head takes
        # 284 and 325 us against 279 and 329.
        note="cuBLAS, where it wins in decode",
    )
)
