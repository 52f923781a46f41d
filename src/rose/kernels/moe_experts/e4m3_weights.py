"""MXFP4 experts as the decode kernel expands them to E4M3: one power of two for 64 rows (decode_e4m3.cuh).

With its block's scale a code becomes an E4M3 number, in units of 2^(exponent - 127) of its tile: exact where the scales
of the tile's 64 rows, all their columns, blocks of zeros left out, differ by at most 2^14. Smaller blocks go to the
nearest E4M3 number, at most 2^-18 of the largest weight that the tile's highest scale allows away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rose.kernels.formats import MXFP4, FormattedTensor
from rose.kernels.moe_experts.mxfp4_tiles import CHUNK
from rose.kernels.weights import ExpertWeights

TILE_ROWS = 64
_BELOW = 6
"""Of a tile's exponent, from its highest scale on: the largest code, 6, times 2^6 fits E4M3."""
_MAGNITUDES = 0x7777_7777_7777_7777
"""Of sixteen codes, without their signs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class E4m3Experts:
    """MXFP4 experts with the exponents of their tiles; the weights themselves are not copied.

    Shapes   gate_up_exponents_ET int32 [E, 2I / 64], down_exponents_ET int32 [E, D / 64], biased by 127
    """

    weights: ExpertWeights
    gate_up_exponents_ET: Tensor
    down_exponents_ET: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes held besides the weights, which other implementations share."""
        return 4 * (self.gate_up_exponents_ET.numel() + self.down_exponents_ET.numel())


def with_exponents(weights: ExpertWeights) -> E4m3Experts:
    """Find the exponents of both matrices."""
    return E4m3Experts(
        weights=weights,
        gate_up_exponents_ET=tile_exponents(weights.gate_up),
        down_exponents_ET=tile_exponents(weights.down),
    )


def tile_exponents(matrix: FormattedTensor) -> Tensor:
    """Return int32 [E, N / 64]; at least 1, below which the unit would leave float32's normal numbers."""
    assert matrix.format == MXFP4, f"made for mxfp4, not {matrix.format.name}"
    assert matrix.scales is not None, "mxfp4 comes with scales"
    experts, rows, _ = matrix.shape
    assert rows % TILE_ROWS == 0, f"{rows} rows are no whole tiles of {TILE_ROWS}"
    highest_ET = torch.cat(
        [
            _highest_scales(matrix.values[e : e + CHUNK], matrix.scales[e : e + CHUNK])
            for e in range(0, experts, CHUNK)
        ]
    )
    return (highest_ET.to(torch.int32) - _BELOW).clamp_min(1)


def _highest_scales(values: Tensor, scales: Tensor) -> Tensor:
    """Return uint8 [E, N / 64]. The kernel takes any scale for a block of zeros, which may have come with any."""
    halves = values.view(torch.int64).view(*scales.shape, 2)  # of a block's 32 codes
    is_zero = (halves[..., 0] | halves[..., 1]) & _MAGNITUDES == 0
    found = scales.masked_fill(is_zero, 0)
    return found.view(len(values), values.shape[1] // TILE_ROWS, -1).amax(dim=-1)
