"""E4M3 with shared scales: weights in 128x128 tiles, activations in groups of one row.

Weights take power-of-two scales, because then MXFP4 turns into FP8 without loss wherever the block exponents of a
tile, blocks of zeros left out, differ by at most 14. Weights have no lower clamp on amax; an all-zero tile has scale 1.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from rose.kernels.formats import E4M3_MAX, FP8_BLOCK, MXFP4, FormattedTensor, to_e4m3
from rose.quant.powers import power_of_two, require_finite, scale_by_power, smallest_exponent
from rose.utils.math import ceil_div

EXACT_SPAN = 14
"""Largest difference of MXFP4 block exponents within a tile for which FP8 holds every value."""
ACTIVATION_AMAX_FLOOR = 1e-4
_TILE = 128
# Exponent of an MXFP4 block minus that of its tile: 0.5 x 2^9 = 256 is the largest that fits in 448, and
# 6 x 2^-13 is under half the smallest E4M3 number, so all below are zeros.
_LOWEST, _HIGHEST = -14, 9


def tile_amax(w: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitude per block of [..., N, K], as [..., ceil(N/rows), ceil(K/columns)]."""
    rows, columns = block
    num_rows, num_columns = w.shape[-2:]
    below, right = -num_rows % rows, -num_columns % columns
    magnitudes = pad(w.float().abs(), (0, right, 0, below))  # zeros do not change an amax
    lead = magnitudes.shape[:-2]
    grid = magnitudes.view(
        *lead, (num_rows + below) // rows, rows, (num_columns + right) // columns, columns
    )
    return grid.amax(dim=(-3, -1))


def spread_blocks(scales: Tensor, block: tuple[int, int], like: Tensor) -> Tensor:
    """Repeat one number per block over the elements of the [..., N, K] matrix `like`."""
    (rows, columns), (num_rows, num_columns) = block, like.shape[-2:]
    spread = scales.repeat_interleave(rows, dim=-2)[..., :num_rows, :]
    return spread.repeat_interleave(columns, dim=-1)[..., :num_columns]


def encode(w: Tensor) -> FormattedTensor:
    """Encode weights [..., N, K] in 128x128 tiles with power-of-two scales.

    Raises  CheckpointError where a weight is NaN or infinite
    """
    amax = require_finite(tile_amax(w, (_TILE, _TILE)), "fp8_block")
    exponents = smallest_exponent(amax, largest=E4M3_MAX)
    spread = spread_blocks(exponents, (_TILE, _TILE), w)
    values = to_e4m3(scale_by_power(w, -spread))
    return FormattedTensor(format=FP8_BLOCK, values=values, scales=power_of_two(exponents))


def quantize_blocks(x: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Quantise [..., N, K] with float32 scales max(amax, 1e-4) / 448 per block.

    Returns  E4M3 values of the same shape, float32 scales
    Source   kernels/quantize_activation/contract.py, for blocks (1, 128) and (1, 64)
    """
    scales = tile_amax(x, block).clamp_min(ACTIVATION_AMAX_FLOOR) / E4M3_MAX
    return to_e4m3(x.float() / spread_blocks(scales, block, x)), scales


def quantize_activation(x_TD: Tensor, group: int = 128) -> tuple[Tensor, Tensor]:
    """Quantise rows in groups of `group` columns; returns E4M3 [T, D] and float32 [T, ceil(D / group)]."""
    return quantize_blocks(x_TD, (1, group))


@lru_cache(maxsize=4)
def _pairs_table(device: str) -> Tensor:
    """Return int16 [(_HIGHEST - _LOWEST + 1) * 256]: a byte of two E2M1 codes, times 2^d, as two E4M3 bytes."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256)
    pairs = torch.stack([codes[byte & 15], codes[byte >> 4]], dim=-1)
    powers = power_of_two(torch.arange(_LOWEST, _HIGHEST + 1))
    table = to_e4m3(powers[:, None, None] * pairs)
    return table.view(torch.int16).flatten().to(device)


def _scale_bytes(matrix: FormattedTensor) -> Tensor:
    assert matrix.format is MXFP4, f"made for mxfp4, not {matrix.format.name}"
    assert matrix.scales is not None, "mxfp4 comes with scales"
    return matrix.scales


def _block_magnitudes(blocks: Tensor) -> Tensor:
    """Return uint8 [...]: the largest E2M1 magnitude code, 0..7, of each block [..., 16]."""
    return torch.maximum(blocks & 7, (blocks >> 4) & 7).amax(dim=-1)


def _tile_reduce(x: Tensor, fill: int, *, largest: bool) -> Tensor:
    """Reduce int32 [..., N, K/32] over tiles of 128 rows and 4 blocks."""
    num_rows, num_blocks = x.shape[-2:]
    below, right = -num_rows % _TILE, -num_blocks % 4
    padded = pad(x, (0, right, 0, below), value=fill)
    grid = padded.view(*x.shape[:-2], ceil_div(num_rows, _TILE), _TILE, ceil_div(num_blocks, 4), 4)
    return grid.amax(dim=(-3, -1)) if largest else grid.amin(dim=(-3, -1))


def from_mxfp4(matrix: FormattedTensor) -> FormattedTensor:
    """Turn MXFP4 [..., N, K] into FP8 tiles by table, the same bits as decoding and encoding.

    Bit-exact for every tile whose `exponent_spans` is at most 14; beyond, rounded to the nearest.
    """
    blocks, exponents = matrix.values, _scale_bytes(matrix).to(torch.int32) - 127
    codes = _block_magnitudes(blocks).to(torch.int32)
    # Exponents of the block's amax: codes 1..7 are 0.5 1 1.5 2 3 4 6, so floor(log2) is -1 0 0 1 1 2 2. All of
    # them have a mantissa of 1 or 1.5, both under 448 / 256 = 1.75: the tile's exponent is floor(log2) - 8.
    tops = torch.where(codes > 0, exponents + codes // 2 - 1, -1000)
    tile_tops = _tile_reduce(tops, -1000, largest=True)
    tiles = torch.where(tile_tops > -1000, tile_tops - 8, 0)
    shift = exponents - spread_blocks(tiles, (_TILE, 4), exponents)
    rows_of_table = (shift.clamp(_LOWEST, _HIGHEST) - _LOWEST) * 256
    index = blocks.to(torch.int32) + rows_of_table.unsqueeze(-1)
    pairs = _pairs_table(str(blocks.device)).index_select(0, index.flatten())
    values = pairs.view(torch.float8_e4m3fn).view(matrix.shape)
    return FormattedTensor(format=FP8_BLOCK, values=values, scales=power_of_two(tiles))


def exponent_spans(matrix: FormattedTensor) -> Tensor:
    """Return int32 per 128x128 tile: highest minus lowest block exponent of MXFP4, blocks of zeros left out."""
    exponents = _scale_bytes(matrix).to(torch.int32)
    present = _block_magnitudes(matrix.values) > 0
    highest = _tile_reduce(torch.where(present, exponents, -1), -1, largest=True)
    lowest = _tile_reduce(torch.where(present, exponents, 999), 999, largest=False)
    return (highest - lowest).clamp_min(0)
