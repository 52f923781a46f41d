"""Triton kernels around the grouped products: sort by expert, quantise and scatter rows, combine.

The layout that they share: a *row* is one (token, k) pair; the rows of expert e are starts[e] ..
starts[e + 1] - 1, in the order of the pairs, with no padding between experts. A *tile* is up to BLOCK_M rows
of one expert. Nothing is read back by the host: launches are sized for the worst case and leave early.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rose.kernels.moe_experts.rows import RowTable, allocate_rows
from rose.utils.math import ceil_div, round_up

BLOCK_PAIRS = 128
"""Pairs per program of the counting and ranking kernels; 128 x 128 experts is 64 registers a thread."""


@triton.jit
def _count_kernel(ids_ptr, counts_ptr, num_pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, EXPERTS)
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
    is_mine = (ids[:, None] == expert[None, :]).to(tl.int32)
    tl.store(counts_ptr + block * EXPERTS + expert, tl.sum(is_mine, axis=0))


@triton.jit
def _scan_kernel(
    counts_ptr, starts_ptr, tiles_ptr, expert_ptr, num_blocks,
    E: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    # Counts become ranks: how many rows of the expert come from earlier blocks.
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, num_blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        offset = block[:, None] * EXPERTS + expert[None, :]
        is_in = (block < num_blocks)[:, None]
        counts = tl.load(counts_ptr + offset, mask=is_in, other=0)
        before = tl.cumsum(counts, axis=0) - counts + total[None, :]
        tl.store(counts_ptr + offset, before, mask=is_in)
        total += tl.sum(counts, axis=0)
    ends = tl.cumsum(total, axis=0)
    tl.store(starts_ptr + expert, ends - total, mask=expert < E)
    tl.store(starts_ptr + E, tl.sum(total, axis=0))
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles, axis=0)
    tl.store(tiles_ptr + expert, tile_ends - tiles, mask=expert < E)
    num_tiles = tl.sum(tiles, axis=0)
    tl.store(tiles_ptr + E, num_tiles)
    for first in range(0, num_tiles, CHUNK):
        tile = first + tl.arange(0, CHUNK)
        owner = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        tl.store(expert_ptr + tile, owner, mask=tile < num_tiles)


@triton.jit
def _rank_kernel(
    ids_ptr, counts_ptr, starts_ptr, row_ptr, num_pairs,
    E: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, EXPERTS)
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
    base = tl.load(counts_ptr + block * EXPERTS + expert)
    base += tl.load(starts_ptr + expert, mask=expert < E, other=0)
    is_mine = ids[:, None] == expert[None, :]
    rank = tl.cumsum(is_mine.to(tl.int32), axis=0) - 1 + base[None, :]
    row = tl.sum(tl.where(is_mine, rank, 0), axis=1)
    tl.store(row_ptr + pair, tl.where(ids >= 0, row, -1), mask=pair < num_pairs)


def sort_by_expert(expert_ids_TK: Tensor, *, num_experts: int, block_m: int) -> RowTable:
    """Give each (token, k) pair its row; stable, so that results do not depend on launch order.

    Aliasing  allocates through torch's caching allocator; safe inside graph capture
    """
    num_pairs = expert_ids_TK.numel()
    device = expert_ids_TK.device
    experts = triton.next_power_of_2(num_experts)
    num_blocks = ceil_div(num_pairs, BLOCK_PAIRS)
    counts = torch.empty(num_blocks, experts, dtype=torch.int32, device=device)
    table = allocate_rows(expert_ids_TK, num_experts=num_experts, block_m=block_m)
    _count_kernel[(num_blocks,)](
        expert_ids_TK, counts, num_pairs, EXPERTS=experts, BLOCK=BLOCK_PAIRS, num_warps=8
    )
    _scan_kernel[(1,)](
        counts, table.starts_E1, table.tiles_E1, table.expert_M, num_blocks,
        E=num_experts, EXPERTS=experts, BLOCK_M=block_m, CHUNK=64, num_warps=8,
    )  # fmt: skip
    _rank_kernel[(num_blocks,)](
        expert_ids_TK, counts, table.starts_E1, table.row_TK, num_pairs,
        E=num_experts, EXPERTS=experts, BLOCK=BLOCK_PAIRS, num_warps=8,
    )  # fmt: skip
    return table


@triton.jit
def to_e4m3(x, INTERPRETED: tl.constexpr):
    """Round to E4M3, nearest even, clamped.

    The interpreter's own cast loses carries and subnormals: there the number is first put on the E4M3 grid
    in float32, by adding and subtracting 1.5 * 2^23 grid steps. Subnormals below 2^-6 still become 0.
    """
    x = tl.clamp(x, -448.0, 448.0)
    if INTERPRETED:
        exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
        step = ((tl.maximum(exponent, 121) - 3) << 23).to(tl.float32, bitcast=True)
        x = (x + step * 12582912.0) - step * 12582912.0
    return x.to(tl.float8e4nv)


@triton.jit
def _quantize_scatter_kernel(
    x_ptr, row_ptr, values_ptr, scales_ptr, scales_stride,
    D: tl.constexpr, CHOSEN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_in = column < D
    x = tl.load(x_ptr + token * D + column, mask=is_in, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4) / 448.0
    value = to_e4m3(x / scale[:, None], INTERPRETED)
    for k in tl.static_range(CHOSEN):
        row = tl.load(row_ptr + token * CHOSEN + k).to(tl.int64)
        is_here = row >= 0
        tl.store(values_ptr + row * D + column, value, mask=is_in & is_here)
        tl.store(
            scales_ptr + group * scales_stride + row, scale, mask=(group * GROUP < D) & is_here
        )


def quantize_scatter(
    x_TD: Tensor, table: RowTable, *, group: int, interpreted: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise each token once and copy it to its rows.

    Shapes   R rows = T K, B = ceil(D / group)
    Returns  values e4m3 [R, D]; scales float32 [B, R rounded up to 4] (rows contiguous, as TMA wants them)
    """
    num_tokens, hidden = x_TD.shape
    num_rows = table.row_TK.numel()
    num_groups = ceil_div(hidden, group)
    values_RD = x_TD.new_empty(num_rows, hidden, dtype=torch.float8_e4m3fn)
    scales_BR = x_TD.new_empty(num_groups, round_up(num_rows, 4), dtype=torch.float32)
    _quantize_scatter_kernel[(num_tokens,)](
        x_TD, table.row_TK, values_RD, scales_BR, scales_BR.stride(0),
        D=hidden, CHOSEN=table.row_TK.shape[1], GROUP=group,
        GROUPS=triton.next_power_of_2(num_groups), INTERPRETED=interpreted, num_warps=4,
    )  # fmt: skip
    return values_RD, scales_BR


@triton.jit
def _combine_kernel(
    y_ptr, row_ptr, weight_ptr, out_ptr, D: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < D
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(CHOSEN):
        row = tl.load(row_ptr + token * CHOSEN + k).to(tl.int64)
        weight = tl.load(weight_ptr + token * CHOSEN + k).to(tl.float32)
        y = tl.load(y_ptr + row * D + column, mask=is_in & (row >= 0), other=0.0)
        total += weight * y.to(tl.float32)
    tl.store(out_ptr + token * D + column, total.to(out_ptr.dtype.element_ty), mask=is_in)


def combine(y_RD: Tensor, table: RowTable, expert_weights_TK: Tensor, *, out_TD: Tensor) -> None:
    """Add the weighted rows of each token, k = 0 first, in float32 with one rounding."""
    num_tokens, hidden = out_TD.shape
    block = 1024
    _combine_kernel[(num_tokens, ceil_div(hidden, block))](
        y_RD, table.row_TK, expert_weights_TK, out_TD,
        D=hidden, CHOSEN=table.row_TK.shape[1], BLOCK=block, num_warps=4,
    )  # fmt: skip
