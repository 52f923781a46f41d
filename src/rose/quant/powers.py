"""Exact powers of two, and the exponent that brings an amax under a format's largest number.

`torch.exp2` and `ldexp` go through a power function and overflow on the way for far exponents; scales must be exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.utils.errors import CheckpointError


def power_of_two(exponent: Tensor) -> Tensor:
    """Return float32 2^exponent for integers in -149..127, made from the bits."""
    exponent = exponent.to(torch.int32)
    normal = (exponent.clamp(-126, 127) + 127) << 23
    subnormal = torch.ones_like(exponent) << (exponent + 149).clamp(0, 23)
    return torch.where(exponent >= -126, normal, subnormal).view(torch.float32)


def scale_by_power(x: Tensor, exponent: Tensor) -> Tensor:
    """Return float32 x * 2^exponent without overflow on the way; -290 <= exponent <= 250."""
    half = exponent.to(torch.int32) // 2
    return x.float() * power_of_two(half) * power_of_two(exponent.to(torch.int32) - half)


def require_finite(amax: Tensor, format_name: str) -> Tensor:
    """Return `amax`.

    Raises  CheckpointError where it is NaN or infinite: no scale fits that.
    """
    if not bool(torch.isfinite(amax).all()):
        raise CheckpointError(
            f"weights to be encoded in {format_name} hold NaN or infinity; finite numbers are needed; "
            "the checkpoint is damaged, fetch it again"
        )
    return amax


def smallest_exponent(amax: Tensor, *, largest: float) -> Tensor:
    """Return int32 t: the smallest with amax <= largest * 2^t; 0 where amax is 0.

    Exact, since mantissas are compared and nothing is divided.
    """
    bound = torch.frexp(torch.tensor(largest))
    mantissa, exponent = torch.frexp(amax.float())
    t = exponent - bound.exponent.to(exponent.device) + (mantissa > bound.mantissa.item())
    return torch.where(amax > 0, t, torch.zeros_like(t)).to(torch.int32)
