"""MXFP4: E2M1 codes, two per byte, with one power-of-two scale per 32 columns.

Encoding takes the smallest power of two that is at least amax / 6, so what was MXFP4 once comes back without loss
(the scale byte of a block may differ from the original's, the numbers do not). Decoding is `kernels.formats.decode`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.formats import MXFP4, FormattedTensor
from rose.quant.powers import require_finite, scale_by_power, smallest_exponent
from rose.utils.errors import CheckpointError

_LARGEST = 6.0
_BLOCK = 32
NAN_SCALE = 255


def encode(w: Tensor) -> FormattedTensor:
    """Encode [..., N, K], K a multiple of 32.

    Raises  CheckpointError where 32 does not divide the columns, or a weight is NaN or infinite.
    """
    if w.shape[-1] % _BLOCK:
        raise CheckpointError(
            f"mxfp4 was asked for a matrix of {w.shape[-1]} columns; the columns must be a multiple of {_BLOCK}; "
            "choose another format"
        )
    blocks = w.float().unflatten(-1, (-1, _BLOCK))
    # E8M0 holds -127..127; only numbers at the very ends of float32 meet this clamp.
    amax = require_finite(blocks.abs().amax(dim=-1), "mxfp4")
    exponents = smallest_exponent(amax, largest=_LARGEST).clamp(-127, 127)
    codes = _round_to_codes(scale_by_power(blocks, -exponents.unsqueeze(-1)))
    values = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return FormattedTensor(format=MXFP4, values=values, scales=(exponents + 127).to(torch.uint8))


def _round_to_codes(x: Tensor) -> Tensor:
    """Return uint8 codes of the nearest E2M1 numbers; ties go to the even code, past 6 is 6, -0 stays -0."""
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    for midpoint, is_up in (
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        code += (a >= midpoint) if is_up else (a > midpoint)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def check_scales(scales: Tensor, name: str) -> None:
    """Refuse scale bytes of 255, which stand for NaN.

    Raises  CheckpointError naming the tensor.
    """
    if scales.numel() and int(scales.max()) == NAN_SCALE:
        raise CheckpointError(
            f"{name} holds the scale byte 255 (NaN); allowed: 0 to 254; the file is damaged, fetch it again"
        )
