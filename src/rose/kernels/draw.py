"""Random operands for `cases.py` and for synthetic models: drawn on the device, straight in their format.

Nothing is drawn wide and then converted, so the experts of a 120b layer take milliseconds on a GPU.
Matrices have elements of about 1 / sqrt(columns), so that products of unit rows have unit size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rose.kernels.formats import FORMATS, FP8_BLOCK, MXFP4, FormattedTensor
from rose.utils.dtypes import torch_dtype

_E2M1_RMS = math.sqrt(sum(m * m for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
"""Of uniformly drawn codes."""
_E4M3_RMS = 0.6
"""Of uniformly drawn bytes with the top exponent bit clear: magnitudes below 2."""


def generator(device: str | torch.device, seed: int) -> torch.Generator:
    """Return a seeded generator of a device."""
    return torch.Generator(device).manual_seed(seed)


def normal(
    *shape: int, source: torch.Generator, dtype: str = "float32", scale: float = 1.0
) -> Tensor:
    """Draw normal numbers of standard deviation `scale`."""
    numbers = torch.randn(shape, generator=source, device=source.device, dtype=torch_dtype(dtype))
    return numbers if scale == 1.0 else numbers.mul_(scale)


def _bytes(*shape: int, source: torch.Generator, high: int = 256, low: int = 0) -> Tensor:
    return torch.randint(
        low, high, shape, generator=source, device=source.device, dtype=torch.uint8
    )


def _exponents(*shape: int, source: torch.Generator, scale: float) -> Tensor:
    """Draw exponents biased by 127, four in a row of them used, with `scale` their root mean square."""
    spread = math.sqrt((0.25 + 1 + 4) / 3)  # of one less, the same, one more
    low = math.floor(math.log2(scale / spread))
    share_above = ((scale / spread / 2.0**low) ** 2 - 1) / 3
    is_above = torch.rand(shape, generator=source, device=source.device) < share_above
    return _bytes(*shape, source=source, low=126 + low, high=129 + low) + is_above


def matrix(
    format_name: str, *shape: int, source: torch.Generator, gain: float = 1.0
) -> FormattedTensor:
    """Draw a matrix [..., N, K] in any resident format, its elements about gain / sqrt(K) large.

    Raises  ValueError for mxfp4 with K no multiple of 32, and for formats of activations.
    """
    *lead, rows, columns = shape
    kind = FORMATS[format_name]
    scale = gain / math.sqrt(columns)
    if kind.block is None:
        values = normal(*shape, source=source, dtype=kind.element, scale=scale)
        return FormattedTensor(format=kind, values=values)
    if kind == MXFP4:
        if columns % 32:
            raise ValueError(f"mxfp4 needs columns in blocks of 32, got {columns}")
        return FormattedTensor(
            format=kind,
            values=_bytes(*lead, rows, columns // 32, 16, source=source),
            scales=_exponents(*lead, rows, columns // 32, source=source, scale=scale / _E2M1_RMS),
        )
    if kind != FP8_BLOCK:
        raise ValueError(f"{format_name} is a format of activations, not of weights")
    values = _bytes(*shape, source=source).bitwise_and_(0xBF).view(torch.float8_e4m3fn)
    grid = kind.scale_shape(rows, columns)
    exponents = _exponents(*lead, *grid, source=source, scale=scale / _E4M3_RMS)
    scales = (exponents.int() << 23).view(torch.float32)  # powers of two, by their bits
    return FormattedTensor(format=kind, values=values, scales=scales)


def routing(tokens: int, experts: int, chosen: int, *, source: torch.Generator) -> Tensor:
    """Draw `chosen` different experts for each token, all equally likely; int32 [tokens, chosen]."""
    scores = torch.rand(tokens, experts, generator=source, device=source.device)
    return scores.topk(chosen, dim=-1).indices.int()


def expected_experts(tokens: int, experts: int, chosen: int) -> float:
    """Return how many different experts such a routing hits on average."""
    return experts * (1 - (1 - chosen / experts) ** tokens)
