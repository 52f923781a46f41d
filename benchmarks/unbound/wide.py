"""The experts of wide.cuh on torch tensors: tiles of 256 tokens, one scale per token, a fixed one for the SwiGLU.

Sort, combine and the order of columns are those of the bound experts (cuda_fused, cuda_swapped).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from rose.kernels.build import CudaLibrary
from rose.kernels.formats import FormattedTensor
from rose.kernels.moe_experts import cuda_swapped
from rose.kernels.moe_experts.cuda_swapped import SwappedLibrary
from rose.kernels.moe_experts.mxfp4_tiles import CHUNK, multipliers, top_exponents
from rose.kernels.moe_experts.rows import RowTable
from rose.kernels.moe_experts.swapped_tables import OffsetMatrix, with_offsets
from rose.kernels.weights import ExpertWeights
from rose.utils.math import ceil_div

_ITEM_ROWS = 128
_BLOCKS = 4
"""Blocks of 32 in a stage."""
_LOWEST = 27
"""As in swapped_tables: rows of smaller weights count from 2^-100."""
SOURCE = Path(__file__).with_name("wide_sm90.cu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How both products run."""

    promote: bool = False
    """Sums leave the tensor core every 256 columns; tiles are half as long then."""
    groups: bool = False
    """The SwiGLU leaves as bf16, is rounded in groups of 128 columns and multiplied as bound (cuda_swapped)."""
    late_ns: int = 0
    """By how much the second consumer begins later."""
    ahead: int = 0
    """By how many stages codes are asked into the L2 cache before they are copied."""

    @property
    def rows(self) -> int:
        """Tokens of a tile at most."""
        return 128 if self.promote else 256


SHAPES = {
    "wide": Shape(),
    "wide_late_500": Shape(late_ns=500),
    "wide_late_1000": Shape(late_ns=1000),
    "wide_ahead": Shape(ahead=8),
    "wide_promote": Shape(promote=True),
    "wide_groups": Shape(groups=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WideMatrix:
    """One matrix of all experts as wide.cuh reads it.

    Shapes   E experts, N outputs, K inputs
             codes        mxfp4 codes as FormattedTensor has them
             offsets      uint8 [E, ceil(N / 128), ceil(K / 128), 512]
             row_scales   float32 [E, ceil(N / 128)], powers of two
    """

    codes: Tensor
    offsets: Tensor
    row_scales: Tensor
    shape: tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WideExperts:
    """MXFP4 experts with what their expansion needs; the weights themselves are not copied."""

    weights: ExpertWeights
    gate_up: WideMatrix
    down: WideMatrix | OffsetMatrix
    """As the shape reads it."""

    @property
    def num_bytes(self) -> int:
        """Bytes held besides the weights, which other implementations share."""
        both = (self.gate_up, self.down)
        return sum(m.offsets.numel() + 4 * m.row_scales.numel() for m in both)


def prepare(weights: ExpertWeights, shape: Shape) -> WideExperts:
    """Find row scales and offsets of both matrices."""
    own = None if shape.groups else _matrix(weights.down, is_paired=False)
    return WideExperts(
        weights=weights,
        gate_up=_matrix(weights.gate_up, is_paired=True),
        down=own or with_offsets(weights).down,
    )


def _matrix(matrix: FormattedTensor, *, is_paired: bool) -> WideMatrix:
    assert matrix.scales is not None, "mxfp4 comes with scales"
    experts, rows, columns = matrix.shape
    parts = [
        _offsets(matrix.values[e : e + CHUNK], matrix.scales[e : e + CHUNK], is_paired=is_paired)
        for e in range(0, experts, CHUNK)
    ]
    offsets, exponents = (torch.cat(each) for each in zip(*parts, strict=True))
    return WideMatrix(
        codes=matrix.values,
        offsets=offsets,
        row_scales=multipliers(exponents),
        shape=(experts, rows, columns),
    )


def _offsets(values: Tensor, scales: Tensor, *, is_paired: bool) -> tuple[Tensor, Tensor]:
    """Return offsets [E, items, stages, 512] and biased exponents [E, items]; swapped_tables explains the numbers."""
    top = top_exponents(values, scales)
    experts, rows, blocks = top.shape
    items, stages = ceil_div(rows, _ITEM_ROWS), ceil_div(blocks, _BLOCKS)
    tops = pad(top.amax(dim=2), (0, -rows % _ITEM_ROWS)).view(experts, items, _ITEM_ROWS)
    tops = tops.amax(dim=2)
    exponents = torch.where(tops > 0, tops - 8, 127).clamp_min(_LOWEST)
    shifts = scales.int() - exponents.repeat_interleave(_ITEM_ROWS, dim=1)[:, :rows].unsqueeze(2)
    offsets = (8 * (shifts.clamp(-14, 9) + 14)).to(torch.uint8)
    offsets = pad(offsets, (0, 0, 0, -rows % _ITEM_ROWS))
    if blocks % _BLOCKS:  # a last half group: two threads of a quad share a block
        halves = offsets[:, :, -2:].repeat_interleave(2, dim=2)
        offsets = torch.cat([offsets[:, :, :-2], halves], dim=2)
    ordered = offsets.view(experts, items, _ITEM_ROWS, stages, _BLOCKS)
    row, block = _places(is_paired=is_paired, device=values.device)
    picked = ordered.permute(0, 1, 3, 2, 4)[:, :, :, row, block]
    return picked.reshape(experts, items, stages, 2 * 256).contiguous(), exponents


def _places(*, is_paired: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row of a tile and the block that a thread's byte h is of, [256, 2] each (`code_row` of wide.cuh)."""
    thread = torch.arange(256, device=device).unsqueeze(1)
    half = torch.arange(2, device=device)
    consumer, warp, g, t = thread // 128, thread % 128 // 32, thread % 32 // 4, thread % 4
    if is_paired:
        row = 2 * (8 * (4 * (warp // 2) + 2 * consumer + warp % 2) + g) + half
    else:
        row = 64 * consumer + 16 * warp + 8 * half + g
    return row, t.expand_as(row)


def hidden_scale(limit: float) -> float:
    """What a unit of the SwiGLU's E4M3 numbers is: they reach 448 where it reaches limit (limit + 1)."""
    return limit * (limit + 1) / 448


class WideLibrary:
    """The launchers of wide_sm90.cu on torch tensors; sort and combine are the fused library's."""

    def __init__(self, library: CudaLibrary | None = None, *, defines: Sequence[str] = ()) -> None:
        self.library = library or CudaLibrary(SOURCE, defines=defines)
        self.swapped = SwappedLibrary(defines=defines)
        self.fused = self.swapped.fused
        launcher = self.library.launcher
        self._quantize = launcher("launch_quantize_tokens", "ppppiiip")
        self._gate_up = launcher("launch_wide_gate_up", "ppfippppipppiiiiiiiipfffp")
        self._down = launcher("launch_wide_down", "ppfippppipppiiiiiiipp")

    def build(self) -> None:
        """Compile all sources unless they are compiled."""
        sources = (self.library, self.swapped.library, self.fused.library)
        with ThreadPoolExecutor(len(sources)) as pool:
            list(pool.map(CudaLibrary.build, sources))

    def quantize_rows(self, x_TD: Tensor, table: RowTable) -> tuple[Tensor, Tensor]:
        """Quantise each token once, with one scale, and copy it to its rows in the order that the products read.

        Returns  values e4m3 [R, D]; scales float32 [R]
        """
        tokens, columns = x_TD.shape
        rows = table.row_TK.numel()
        values_RD = x_TD.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
        scales_R = x_TD.new_empty(rows, dtype=torch.float32)
        self._quantize(
            x_TD.data_ptr(), table.row_TK.data_ptr(), values_RD.data_ptr(), scales_R.data_ptr(),
            tokens, columns, table.row_TK.shape[1], _stream(),
        )  # fmt: skip
        return values_RD, scales_R

    def gate_up(
        self, x_RD: Tensor, scales_R: Tensor, table: RowTable, *,
        matrix: WideMatrix, bias_EF: Tensor, alpha: float, limit: float, shape: Shape,
    ) -> Tensor:  # fmt: skip
        """Multiply and apply the SwiGLU.

        Returns  e4m3 [R, I] in units of `hidden_scale(limit)`, as `down` reads it; bf16 in order with `groups`
        """
        dtype = torch.bfloat16 if shape.groups else x_RD.dtype
        hidden_RI = x_RD.new_empty(x_RD.shape[0], matrix.shape[1] // 2, dtype=dtype)
        self._gate_up(
            *operands(x_RD, scales_R, 0.0, table, matrix, bias_EF, shape),
            int(shape.groups), hidden_RI.data_ptr(), hidden_scale(limit), alpha, limit, _stream(),
        )  # fmt: skip
        return hidden_RI

    def round_in_groups(self, hidden_RI: Tensor, table: RowTable) -> tuple[Tensor, Tensor]:
        """Round a bf16 SwiGLU as the bound `down` reads it: values e4m3 [R, I], scales float32 [groups, R or more]."""
        rows = torch.arange(len(hidden_RI), dtype=torch.int32, device=hidden_RI.device)
        return self.swapped.quantize_rows(hidden_RI, replace(table, row_TK=rows.unsqueeze(1)))

    def down(
        self, hidden_RI: Tensor, table: RowTable, *,
        matrix: WideMatrix, bias_ED: Tensor, limit: float, shape: Shape,
    ) -> Tensor:  # fmt: skip
        """Multiply and add the bias. Returns bf16 [R, D], not yet weighted."""
        y_RD = hidden_RI.new_empty(hidden_RI.shape[0], matrix.shape[1], dtype=torch.bfloat16)
        self._down(
            *operands(hidden_RI, None, hidden_scale(limit), table, matrix, bias_ED, shape),
            y_RD.data_ptr(), _stream(),
        )  # fmt: skip
        return y_RD


def run_experts(
    library: WideLibrary,
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: WideExperts,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
    shape: Shape,
) -> None:
    """The whole operation; weights come as `prepare` makes them."""
    if x_TD.shape[0] == 0:
        return
    up, down, plain = weights.gate_up, weights.down, weights.weights
    table = library.fused.sort_by_expert(expert_ids_TK, num_experts=up.shape[0], block_m=shape.rows)
    x_RD, scales_R = library.quantize_rows(x_TD, table)
    hidden_RI = library.gate_up(
        x_RD, scales_R, table, matrix=up, bias_EF=plain.gate_up_bias_EF,
        alpha=swiglu_alpha, limit=swiglu_limit, shape=shape,
    )  # fmt: skip
    if isinstance(down, OffsetMatrix):
        short = library.fused.sort_by_expert(
            expert_ids_TK, num_experts=up.shape[0], block_m=cuda_swapped.ROWS
        )
        values, scales = library.round_in_groups(hidden_RI, table)
        y_RD = library.swapped.down(values, scales, short, matrix=down, bias_ED=plain.down_bias_ED)
    else:
        y_RD = library.down(
            hidden_RI,
            table,
            matrix=down,
            bias_ED=plain.down_bias_ED,
            limit=swiglu_limit,
            shape=shape,
        )
    library.fused.combine(y_RD, table, expert_weights_TK, out_TD=out_TD)


def operands(
    x_RC: Tensor, scales_R: Tensor | None, scale: float, table: RowTable,
    matrix: WideMatrix, bias_EN: Tensor, shape: Shape,
) -> tuple[int | float | None, ...]:  # fmt: skip
    """Return what both launchers take first."""
    assert table.block_m == shape.rows, "tiles are as long as the table has them"
    return (
        x_RC.data_ptr(), None if scales_R is None else scales_R.data_ptr(), scale, x_RC.shape[0],
        matrix.codes.data_ptr(), matrix.offsets.data_ptr(), matrix.row_scales.data_ptr(),
        bias_EN.data_ptr(), int(bias_EN.dtype == torch.bfloat16),
        table.starts_E1.data_ptr(), table.tiles_E1.data_ptr(), table.expert_M.data_ptr(),
        table.max_tiles, *matrix.shape, shape.late_ns, shape.ahead, int(shape.promote),
    )  # fmt: skip


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
