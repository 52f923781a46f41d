"""A projection for the batch-invariant mode on a CPU: tiles of a fixed number of rows, in float32."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.formats import FormattedTensor
from rose.kernels.invariant import MOST_WIDENED, Factor, require_equal_rows
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import LinearWeights

_TRIED_ROWS = 1024
"""Of a large matrix: they take the same ways as all of them would, at a bearable price."""


def gemm(
    x_TK: Tensor,
    *,
    weights: LinearWeights | Factor,
    residual_TN: Tensor | None,
    out_TN: Tensor,
) -> None:
    """Product, bias, then residual; large matrices are decoded in every call."""
    factor = weights if isinstance(weights, Factor) else _decoded(weights)
    y_TN = factor.times(x_TK)
    if residual_TN is not None:
        y_TN = y_TN + residual_TN
    out_TN.copy_(y_TN)


def prepare(weights: LinearWeights) -> LinearWeights | Factor:
    """Widen the matrix where it is small, and try whether products with it are invariant."""
    rows, columns = weights.matrix.shape
    if rows * columns <= MOST_WIDENED:
        return require_equal_rows(_decoded(weights))
    require_equal_rows(Factor.of(_some_rows(weights.matrix), None))
    return weights


def _decoded(weights: LinearWeights) -> Factor:
    return Factor.of(weights.matrix.to_float(), weights.bias_N)


def _some_rows(matrix: FormattedTensor) -> Tensor:
    count = min(len(matrix.values), _TRIED_ROWS)
    scales = matrix.scales
    if scales is not None and matrix.format.block is not None:
        scales = scales[: -(-count // matrix.format.block[0])]
    part = FormattedTensor(format=matrix.format, values=matrix.values[:count], scales=scales)
    return part.to_float()


def _workspace(sizes: Sizes, rows: int, _longest: int) -> int:
    return 4 * (rows * (sizes["K"] + sizes["N"]) + sizes["N"] * sizes["K"])


register(
    Implementation(
        operation="gemm",
        name="torch_invariant",
        function=gemm,
        band=Band.PORTABLE,
        device="cpu",
        formats={"activation": frozenset({"float32", "bf16"})},
        prepare=prepare,
        workspace=_workspace,
        is_batch_invariant=True,
        note="tiles of 8 rows; float32 copy of the matrix, made at load",
    )
)
