"""How numbers are stored: the vocabulary in which contracts speak of weights and activations.

A `TensorFormat` names an element type and how scales are shared; a `FormattedTensor` is a matrix in one.
Decoding to float is exact and lives here, because every reference needs it. Encoding lives in `quant`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rose.utils.dtypes import BITS_PER_ELEMENT
from rose.utils.math import ceil_div

E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFormat:
    """One way to store a matrix [rows, columns]; columns are the contraction axis."""

    name: str
    element: str
    """e4m3, e2m1, bf16, float32 or float64."""
    block: tuple[int, int] | None = None
    """Rows and columns that share one scale; None without scales."""
    scale: str | None = None
    """float32 (a multiplier) or e8m0 (an exponent biased by 127)."""

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the scales of a [rows, columns] matrix; the last block may be short."""
        if self.block is None:
            raise ValueError(f"format {self.name} has no scales")
        return ceil_div(rows, self.block[0]), ceil_div(columns, self.block[1])

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a [rows, columns] matrix, scales included."""
        values = rows * columns * BITS_PER_ELEMENT[self.element] // 8
        if self.block is None or self.scale is None:
            return values
        scale_rows, scale_columns = self.scale_shape(rows, columns)
        return values + scale_rows * scale_columns * BITS_PER_ELEMENT[self.scale] // 8


FLOAT64 = TensorFormat(name="float64", element="float64")
FLOAT32 = TensorFormat(name="float32", element="float32")
BF16 = TensorFormat(name="bf16", element="bf16")
FP8_BLOCK = TensorFormat(name="fp8_block", element="e4m3", block=(128, 128), scale="float32")
"""Weights: one power-of-two multiplier per 128x128 tile; the last tile of an axis may be short."""
FP8_GROUP128 = TensorFormat(name="fp8_group128", element="e4m3", block=(1, 128), scale="float32")
"""Activations: one multiplier per row and 128 columns."""
FP8_GROUP64 = TensorFormat(name="fp8_group64", element="e4m3", block=(1, 64), scale="float32")
"""Activations out of an epilogue whose tile is narrower than 128; 2880 = 45 x 64 leaves no tail."""
FP8_TOKEN = TensorFormat(name="fp8_token", element="e4m3", block=(1, 1 << 30), scale="float32")
"""Activations: one multiplier per row, however long."""
FP8_SWIGLU = TensorFormat(name="fp8_swiglu", element="e4m3")
"""The SwiGLU between the experts' products: all numbers count in `swiglu_unit`, past 448 of them the largest."""
FP8_E4M3 = TensorFormat(name="fp8_e4m3", element="e4m3")
"""KV: the numbers themselves, nearest even, past 448 the largest; no scales."""
MXFP4 = TensorFormat(name="mxfp4", element="e2m1", block=(1, 32), scale="e8m0")
"""The checkpoint's own format: two e2m1 codes per byte, the even column in the low nibble."""

FORMATS = {
    f.name: f
    for f in (
        FLOAT64,
        FLOAT32,
        BF16,
        FP8_E4M3,
        FP8_BLOCK,
        FP8_GROUP128,
        FP8_GROUP64,
        FP8_TOKEN,
        FP8_SWIGLU,
        MXFP4,
    )
}
_FORMAT_OF_DTYPE = {torch.float64: FLOAT64, torch.float32: FLOAT32, torch.bfloat16: BF16}


def swiglu_unit(limit: float) -> float:
    """Return the unit of FP8_SWIGLU: a SwiGLU is at most limit (limit + 1), which are 448 of it."""
    return limit * (limit + 1) / E4M3_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class FormattedTensor:
    """A matrix, or a stack of them, in a format.

    Shapes   values  [..., N, K]; mxfp4: uint8 [..., N, K / 32, 16] as in the checkpoint
             scales  [..., scale rows, scale columns]; None without scales
    """

    format: TensorFormat
    values: Tensor
    scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, in elements."""
        if self.format == MXFP4:
            *lead, num_blocks, num_bytes = self.values.shape
            return (*lead, num_blocks * num_bytes * 2)
        return tuple(self.values.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device."""
        scales = 0 if self.scales is None else self.scales.numel() * self.scales.element_size()
        return self.values.numel() * self.values.element_size() + scales

    def to_float(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the stored values as numbers; exact in float32 and float64."""
        return decode(self).to(dtype)

    def __getitem__(self, index: int) -> FormattedTensor:
        """Return one matrix of a stack; a view."""
        scales = None if self.scales is None else self.scales[index]
        return FormattedTensor(format=self.format, values=self.values[index], scales=scales)

    def to(self, device: torch.device | str) -> FormattedTensor:
        """Return the same matrix on another device."""
        scales = None if self.scales is None else self.scales.to(device)
        return FormattedTensor(format=self.format, values=self.values.to(device), scales=scales)


def to_e4m3(x: Tensor) -> Tensor:
    """Round to E4M3, nearest even, saturating: torch casts differ in what they do past 448, so clamp first."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def plain(values: Tensor) -> FormattedTensor:
    """Wrap a float64, float32 or bf16 tensor; it is not copied."""
    return FormattedTensor(format=_FORMAT_OF_DTYPE[values.dtype], values=values)


@lru_cache(maxsize=8)
def _e2m1_pairs(device: str) -> Tensor:
    """Return [256]: the two float32 numbers in each byte as one int64, so that one look-up fetches both."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = torch.tensor([*magnitudes, *(-m for m in magnitudes)])
    byte = torch.arange(256)
    pairs = torch.stack([codes[byte & 15], codes[byte >> 4]], dim=-1)
    return pairs.view(torch.int64).flatten().to(device)


def _decode_mxfp4(values: Tensor, scales: Tensor) -> Tensor:
    pairs = _e2m1_pairs(str(values.device)).index_select(0, values.flatten().int())
    numbers = pairs.view(torch.float32).view(*values.shape[:-1], 32)
    # Powers of two from their bits: `ldexp` goes through pow, which a GPU rounds. Byte 0 is 2^-127, a subnormal.
    exponents = scales.int()
    powers = torch.where(exponents > 0, exponents << 23, 1 << 22).view(torch.float32)
    return numbers.mul_(powers.unsqueeze(-1)).flatten(-2)


def decode(matrix: FormattedTensor) -> Tensor:
    """Decode to float32 (float64 stays float64), [..., N, K].

    Source   OCP microscaling formats for mxfp4; the checkpoint's packing as in docs/numerics.md.
    """
    values, scales, kind = matrix.values, matrix.scales, matrix.format
    if kind.block is None:
        return values if kind == FLOAT64 else values.float()
    assert scales is not None, f"{kind.name} needs scales"
    if kind == MXFP4:
        return _decode_mxfp4(values, scales)
    rows, columns = kind.block
    num_rows, num_columns = values.shape[-2:]
    spread = scales.float()
    if rows > 1:
        spread = spread.repeat_interleave(rows, dim=-2)
    spread = spread[..., :num_rows, :].repeat_interleave(columns, dim=-1)[..., :num_columns]
    return values.float() * spread
