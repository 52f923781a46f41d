"""A projection whose matrix is in E4M3 tiles, for prefill on a GPU: widened to bf16 in every call, then cuBLAS.

Decode reads the tiles themselves (triton_impl.py), which is what they are for; beside the products of a long prompt a
pass over the matrix is little. What it takes on a GPU is to be measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.formats import BF16, FormattedTensor
from rose.kernels.gemm.torch_impl import gemm as plain_gemm
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import LinearWeights


def widened(matrix: FormattedTensor) -> FormattedTensor:
    """Return the matrix in bf16: exact, since scales of fp8_block are powers of two."""
    assert matrix.scales is not None, "fp8_block comes with scales"
    assert matrix.format.block is not None, "fp8_block has tiles"
    (rows, columns), (num_rows, num_columns) = matrix.format.block, matrix.shape
    scales = matrix.scales.bfloat16().repeat_interleave(rows, dim=0)[:num_rows]
    spread_NK = scales.repeat_interleave(columns, dim=1)[:, :num_columns]
    return FormattedTensor(format=BF16, values=matrix.values.to(torch.bfloat16).mul_(spread_NK))


def gemm(
    x_TK: Tensor, *, weights: LinearWeights, residual_TN: Tensor | None, out_TN: Tensor
) -> None:
    """Multiply by the widened matrix."""
    matrix = widened(weights.matrix)
    plain_gemm(
        x_TK,
        weights=LinearWeights(matrix=matrix, bias_N=weights.bias_N),
        residual_TN=residual_TN,
        out_TN=out_TN,
    )


def workspace(sizes: Sizes, _rows: int, _longest: int) -> int:
    """Bytes of a call: the matrix in bf16, and its scales, one for each number."""
    return 2 * 2 * sizes["N"] * sizes["K"]


register(
    Implementation(
        operation="gemm",
        name="torch_fp8",
        function=gemm,
        band=Band.TUNED,
        device="cuda",
        formats={"activation": frozenset({"bf16"}), "weight": frozenset({"fp8_block"})},
        phases=frozenset({"prefill"}),
        workspace=workspace,
        note="widens the matrix to bf16 in every call, then cuBLAS",
    )
)
