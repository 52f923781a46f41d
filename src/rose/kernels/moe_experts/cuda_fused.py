"""Experts for many tokens in CUDA C++ (prefill_fused_sm90.cu), stages on torch tensors. Reads E4M3 or MXFP4.

Nothing is compiled or loaded at import. Outputs and workspace come from torch's caching allocator, so that every
stage may run during graph capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rose.kernels.build import CudaLibrary
from rose.kernels.formats import FormattedTensor
from rose.kernels.moe_experts.mxfp4_tiles import TiledExperts
from rose.kernels.moe_experts.rows import RowTable, allocate_rows
from rose.kernels.registry import Sizes
from rose.kernels.weights import ExpertWeights
from rose.utils.math import ceil_div, round_up

MAX_EXPERTS = 128
MAX_CHOSEN = 8
X_GROUP = 128
"""Columns of a token that share a scale."""
HIDDEN_GROUP = 128
"""SwiGLU channels that share a scale, in every shape."""


VARIANTS = {"r256": 256, "r128": 128}
"""Rows of a tile: 256 (x 128 columns; the only one for mxfp4) or 128 (x 256 columns)."""
DEFAULT = VARIANTS["r256"]
"""Of MXFP4; E4M3 is fastest with r128 where routing is spread (docs/experiments/prefill_experts.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One matrix of all experts as the products read it.

    Shapes   E experts, N outputs, K inputs
             values            e4m3 [E, N, K], or mxfp4 codes as FormattedTensor has them
             scales            float32 [E, ceil(N / 128), ceil(K / 128)]
             exponents         mxfp4: uint8 [E, N, K / 32]; e4m3: None
             tile_exponents    mxfp4: int32 as scales; e4m3: None
    """

    values: Tensor
    scales: Tensor
    shape: tuple[int, int, int]
    exponents: Tensor | None = None
    tile_exponents: Tensor | None = None


def matrices(weights: ExpertWeights | TiledExperts) -> tuple[Matrix, Matrix, ExpertWeights]:
    """Return gate_up, down and the weights that hold the biases; nothing is copied."""
    if isinstance(weights, ExpertWeights):
        return _fp8(weights.gate_up), _fp8(weights.down), weights
    plain = weights.weights
    up = _mxfp4(plain.gate_up, weights.gate_up_scales, weights.gate_up_exponents)
    down = _mxfp4(plain.down, weights.down_scales, weights.down_exponents)
    return up, down, plain


def _fp8(matrix: FormattedTensor) -> Matrix:
    assert matrix.scales is not None, "fp8_block has scales"
    return Matrix(values=matrix.values, scales=matrix.scales, shape=_sizes(matrix))


def _mxfp4(matrix: FormattedTensor, scales: Tensor, tile_exponents: Tensor) -> Matrix:
    return Matrix(
        values=matrix.values,
        scales=scales,
        shape=_sizes(matrix),
        exponents=matrix.scales,
        tile_exponents=tile_exponents,
    )


def _sizes(matrix: FormattedTensor) -> tuple[int, int, int]:
    experts, rows, columns = matrix.shape
    return experts, rows, columns


def quantised_rows(like: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Allocate activations as the products read them, beside `like`; uninitialised.

    Returns  values e4m3 [R, C]; scales float32 [groups of 128, R rounded up to 4]: TMA takes strides of 16 bytes
    """
    assert X_GROUP == HIDDEN_GROUP, "both products read scales of 128 columns"
    values_RC = like.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
    groups = ceil_div(columns, X_GROUP)
    return values_RC, like.new_empty(groups, round_up(rows, 4), dtype=torch.float32)


class FusedLibrary:
    """The launchers of prefill_fused_sm90.cu on torch tensors."""

    def __init__(self, library: CudaLibrary | None = None, *, defines: Sequence[str] = ()) -> None:
        source = Path(__file__).with_name("prefill_fused_sm90.cu")
        self.library = library or CudaLibrary(source, defines=defines)
        launcher = self.library.launcher
        self._sort = launcher("launch_sort", "piiippppp")
        self._quantize = launcher("launch_quantize", "ppppiiiip")
        self._combine = launcher("launch_combine", "ppppiiip")
        self._expand = launcher("launch_expand", "ppppiiip")
        self._gate_up = launcher("launch_gate_up", "ppiipppppipppiiiippiffip")
        self._down = launcher("launch_down", "ppiipppppipppiiiipip")

    def sort_by_expert(
        self, expert_ids_TK: Tensor, *, num_experts: int, block_m: int = DEFAULT
    ) -> RowTable:
        """Give each (token, k) pair its row, stably; tiles have `block_m` rows."""
        table = allocate_rows(expert_ids_TK, num_experts=num_experts, block_m=block_m)
        self._sort(
            expert_ids_TK.data_ptr(), expert_ids_TK.numel(), num_experts, block_m, table.row_TK.data_ptr(),
            table.starts_E1.data_ptr(), table.tiles_E1.data_ptr(), table.expert_M.data_ptr(), current_stream(),
        )  # fmt: skip
        return table

    def quantize_rows(self, x_TD: Tensor, table: RowTable) -> tuple[Tensor, Tensor]:
        """Quantise each token once, in groups of 128 columns, and copy it to its rows.

        Returns  values e4m3 [R, D]; scales float32 [groups, R rounded up to 4]
        """
        tokens, columns = x_TD.shape
        values_RD, scales = quantised_rows(x_TD, table.row_TK.numel(), columns)
        self._quantize(
            x_TD.data_ptr(), table.row_TK.data_ptr(), values_RD.data_ptr(), scales.data_ptr(),
            tokens, columns, table.row_TK.shape[1], scales.stride(0), current_stream(),
        )  # fmt: skip
        return values_RD, scales

    def gate_up(
        self, x_RD: Tensor, x_scales: Tensor, table: RowTable, *,
        matrix: Matrix, bias_EF: Tensor, alpha: float, limit: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Multiply, apply the SwiGLU and quantise in groups of 128 channels.

        Returns  values e4m3 [R, I]; scales float32 [groups, R rounded up to 4]
        """
        out_RI, out_scales = quantised_rows(x_RD, x_RD.shape[0], matrix.shape[1] // 2)
        self._gate_up(
            *_operands(x_RD, x_scales, table, matrix, bias_EF),
            out_RI.data_ptr(), out_scales.data_ptr(), out_scales.stride(0), alpha, limit,
            table.block_m, current_stream(),
        )  # fmt: skip
        return out_RI, out_scales

    def down(
        self, a_RI: Tensor, a_scales: Tensor, table: RowTable, *,
        matrix: Matrix, bias_ED: Tensor,
    ) -> Tensor:  # fmt: skip
        """Multiply and add the bias. Returns bf16 [R, D], not yet weighted."""
        y_RD = a_RI.new_empty(a_RI.shape[0], matrix.shape[1], dtype=torch.bfloat16)
        self._down(
            *_operands(a_RI, a_scales, table, matrix, bias_ED),
            y_RD.data_ptr(), table.block_m, current_stream(),
        )  # fmt: skip
        return y_RD

    def combine(
        self, y_RD: Tensor, table: RowTable, expert_weights_TK: Tensor, *, out_TD: Tensor
    ) -> None:
        """Add the weighted rows of each token, k = 0 first, in float32 with one rounding."""
        tokens, columns = out_TD.shape
        self._combine(
            y_RD.data_ptr(), table.row_TK.data_ptr(), expert_weights_TK.data_ptr(), out_TD.data_ptr(),
            tokens, columns, table.row_TK.shape[1], current_stream(),
        )  # fmt: skip

    def expand(self, matrix: FormattedTensor, tile_exponents: Tensor, *, out: Tensor) -> Tensor:
        """Turn MXFP4 into E4M3 values of given tile exponents.

        Aliasing  writes and returns the head of the flat e4m3 tensor `out`, as [E, N, K]
        """
        assert matrix.scales is not None, "mxfp4 has scales"
        experts, rows, columns = matrix.shape
        if not out.is_meta:  # the memory plan prepares weights that have no numbers
            self._expand(
                matrix.values.data_ptr(), matrix.scales.data_ptr(), tile_exponents.data_ptr(),
                out.data_ptr(), experts, rows, columns, current_stream(),
            )  # fmt: skip
        return out[: experts * rows * columns].view(experts, rows, columns)


def workspace(sizes: Sizes, rows: int, _longest: int) -> int:
    """Bytes of a call: quantised rows, their SwiGLU, the outputs before they are added up."""
    pairs, hidden, inner = rows * sizes["K"], sizes["D"], sizes["I"]
    scales = 4 * pairs * (ceil_div(hidden, X_GROUP) + ceil_div(inner, HIDDEN_GROUP))
    return pairs * (3 * hidden + inner) + scales


def run_experts(
    library: FusedLibrary,
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: ExpertWeights | TiledExperts,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
    block_m: int = DEFAULT,
) -> None:
    """The whole operation in tiles of `block_m` rows; mxfp4 weights come as `mxfp4_tiles.tiled` makes them."""
    if x_TD.shape[0] == 0:
        return
    up, down, plain = matrices(weights)
    table = library.sort_by_expert(expert_ids_TK, num_experts=up.shape[0], block_m=block_m)
    hidden = library.gate_up(
        *library.quantize_rows(x_TD, table), table, matrix=up, bias_EF=plain.gate_up_bias_EF,
        alpha=swiglu_alpha, limit=swiglu_limit,
    )  # fmt: skip
    y_RD = library.down(*hidden, table, matrix=down, bias_ED=plain.down_bias_ED)
    library.combine(y_RD, table, expert_weights_TK, out_TD=out_TD)


def _operands(
    a_RC: Tensor, a_scales: Tensor, table: RowTable, matrix: Matrix, bias_EN: Tensor
) -> tuple[int | None, ...]:
    return (
        a_RC.data_ptr(), a_scales.data_ptr(), a_scales.stride(0), a_RC.shape[0],
        matrix.values.data_ptr(), matrix.scales.data_ptr(),
        _address(matrix.exponents), _address(matrix.tile_exponents),
        bias_EN.data_ptr(), int(bias_EN.dtype == torch.bfloat16),
        table.starts_E1.data_ptr(), table.tiles_E1.data_ptr(), table.expert_M.data_ptr(),
        table.max_tiles, *matrix.shape,
    )  # fmt: skip


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def current_stream() -> int:
    """Return the handle of the stream that work is launched on now."""
    return torch.cuda.current_stream().cuda_stream
