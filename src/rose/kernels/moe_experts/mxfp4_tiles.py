"""MXFP4 experts for FP8 products: the tile exponents that make expansion to E4M3 a lookup.

A tile of 128 x 128 gets the power of two that brings its largest magnitude into [256, 512): every block whose
exponent is at most 14 below the tile's highest one is then exact (facts in docs/numerics.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rose.kernels.formats import MXFP4, FormattedTensor
from rose.kernels.weights import ExpertWeights
from rose.utils.math import ceil_div

_TILE = 128
CHUNK = 8
"""Experts worked on at once: bounds the temporaries of a 120b layer to about 0.3 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledExperts:
    """MXFP4 experts with what their expansion needs.

    Shapes   exponents int32 [E, ceil(N / 128), ceil(K / 128)], biased by 127; scales float32 2^(exponent - 127)
    """

    weights: ExpertWeights
    gate_up_exponents: Tensor
    gate_up_scales: Tensor
    down_exponents: Tensor
    down_scales: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes held besides the weights, which other implementations share."""
        return 8 * (self.gate_up_exponents.numel() + self.down_exponents.numel())


def tile_exponents(matrix: FormattedTensor) -> Tensor:
    """Return the biased exponent of each tile's multiplier, int32 [E, ceil(N / 128), ceil(K / 128)]."""
    assert matrix.format == MXFP4, f"made for mxfp4, not {matrix.format.name}"
    assert matrix.scales is not None, "mxfp4 comes with scales"
    parts = [
        _tile_exponents(matrix.values[e : e + CHUNK], matrix.scales[e : e + CHUNK])
        for e in range(0, matrix.shape[0], CHUNK)
    ]
    return torch.cat(parts)


def top_exponents(values: Tensor, scales: Tensor) -> Tensor:
    """Return the biased exponent of each block's largest magnitude, 0 for a block of zeros; int32 [E, N, K / 32]."""
    code = torch.maximum((values & 7).amax(dim=-1), ((values >> 4) & 7).amax(dim=-1)).int()
    # Codes 1..7 are 0.5 1 1.5 2 3 4 6: floor(log2) is -1 0 0 1 1 2 2.
    return torch.where(code > 0, scales.int() + code // 2 - 1, 0)


def _tile_exponents(values: Tensor, scales: Tensor) -> Tensor:
    top = top_exponents(values, scales)
    rows, blocks = top.shape[-2:]
    top = pad(top, (0, -blocks % 4, 0, -rows % _TILE))
    tiles = top.view(-1, ceil_div(rows, _TILE), _TILE, ceil_div(blocks, 4), 4).amax(dim=(2, 4))
    # At least 1: below, the multiplier would leave float32's normal numbers.
    return torch.where(tiles > 0, tiles - 8, 127).clamp_min(1)


def tiled(weights: ExpertWeights) -> TiledExperts:
    """Find the tile exponents of both matrices; the weights themselves are not copied."""
    up, down = tile_exponents(weights.gate_up), tile_exponents(weights.down)
    return TiledExperts(
        weights=weights,
        gate_up_exponents=up,
        gate_up_scales=multipliers(up),
        down_exponents=down,
        down_scales=multipliers(down),
    )


def multipliers(exponents: Tensor) -> Tensor:
    """Return float32 2^(exponent - 127), made from the bits; exponents in 1..254."""
    return (exponents << 23).view(torch.float32)
