"""MXFP4 experts as operands in registers (prefill_swapped.cuh): one power of two for 128 rows, an offset per block.

A block of 32 codes becomes E4M3 by a table of eight magnitudes. Which of 24 tables follows from how far the block's
exponent is from that of its 128 rows; the offsets of a tile's stage lie together, in the order of the threads that
read them. Blocks whose exponent is at most 14 below the highest one of their 128 rows are exact, the rest are rounded
to the nearest E4M3 number, at most 2^-18 of the rows' largest weight away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rose.kernels.formats import MXFP4, FormattedTensor
from rose.kernels.moe_experts.mxfp4_tiles import CHUNK, multipliers, top_exponents
from rose.kernels.weights import ExpertWeights
from rose.utils.math import ceil_div

_ROWS = 128
_ITEM_ROWS = 256
"""Rows of a tile: two warpgroups, two slabs each."""
_BLOCKS = 4
"""Blocks of 32 in a stage."""
_LOWEST = 27
"""Rows of smaller weights count from 2^-100: a bias in their units stays inside float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetMatrix:
    """One matrix of all experts as the swapped products read it.

    Shapes   E experts, N outputs, K inputs
             codes        mxfp4 codes as FormattedTensor has them
             offsets      uint8 [E, ceil(N / 256), ceil(K / 128), 1024]
             row_scales   float32 [E, ceil(N / 128)], powers of two
    """

    codes: Tensor
    offsets: Tensor
    row_scales: Tensor
    shape: tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetExperts:
    """MXFP4 experts with what their expansion into registers needs; the weights themselves are not copied."""

    weights: ExpertWeights
    gate_up: OffsetMatrix
    down: OffsetMatrix

    @property
    def num_bytes(self) -> int:
        """Bytes held besides the weights, which other implementations share."""
        both = (self.gate_up, self.down)
        return sum(m.offsets.numel() + 4 * m.row_scales.numel() for m in both)


def with_offsets(weights: ExpertWeights) -> OffsetExperts:
    """Find row scales and offsets of both matrices."""
    return OffsetExperts(
        weights=weights,
        gate_up=_matrix(weights.gate_up, is_paired=True),
        down=_matrix(weights.down, is_paired=False),
    )


def _matrix(matrix: FormattedTensor, *, is_paired: bool) -> OffsetMatrix:
    assert matrix.format == MXFP4, f"made for mxfp4, not {matrix.format.name}"
    assert matrix.scales is not None, "mxfp4 comes with scales"
    experts, rows, columns = matrix.shape
    parts = [
        _offsets(matrix.values[e : e + CHUNK], matrix.scales[e : e + CHUNK], is_paired=is_paired)
        for e in range(0, experts, CHUNK)
    ]
    offsets, exponents = (torch.cat(each) for each in zip(*parts, strict=True))
    return OffsetMatrix(
        codes=matrix.values,
        offsets=offsets,
        row_scales=multipliers(exponents),
        shape=(experts, rows, columns),
    )


def _offsets(values: Tensor, scales: Tensor, *, is_paired: bool) -> tuple[Tensor, Tensor]:
    """Return offsets [E, items, stages, 1024] and biased exponents [E, ceil(N / 128)]."""
    top = top_exponents(values, scales)
    experts, rows, blocks = top.shape
    runs = ceil_div(rows, _ROWS)
    tops = pad(top.amax(dim=2), (0, -rows % _ROWS)).view(experts, runs, _ROWS).amax(dim=2)
    exponents = torch.where(tops > 0, tops - 8, 127).clamp_min(_LOWEST)
    shifts = scales.int() - exponents.repeat_interleave(_ROWS, dim=1)[:, :rows].unsqueeze(2)
    offsets = (8 * (shifts.clamp(-14, 9) + 14)).to(torch.uint8)
    offsets = pad(offsets, (0, 0, 0, -rows % _ITEM_ROWS))
    if blocks % _BLOCKS:  # a last half group: two threads of a quad share a block
        halves = offsets[:, :, -2:].repeat_interleave(2, dim=2)
        offsets = torch.cat([offsets[:, :, :-2], halves], dim=2)
    items, stages = ceil_div(rows, _ITEM_ROWS), ceil_div(blocks, _BLOCKS)
    # Rows are (consumer, slab, warp, ...), then (g, gate or up) or (half, g); a thread is (consumer, warp, g, t).
    ends = (8, 2) if is_paired else (2, 8)
    split = offsets.view(experts, items, 2, 2, 4, *ends, stages, _BLOCKS)
    g, half = (5, 6) if is_paired else (6, 5)
    ordered = split.permute(0, 1, 7, 2, 4, g, 8, 3, half)
    return ordered.reshape(experts, items, stages, _ITEM_ROWS * _BLOCKS), exponents
