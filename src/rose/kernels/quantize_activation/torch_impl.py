"""Quantisation of rows with torch operators: runs anywhere, all groups at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rose.kernels.formats import E4M3_MAX
from rose.kernels.quantize_activation.reference import MIN_AMAX
from rose.kernels.registry import Band, Implementation, register


def quantize_activation(x_TD: Tensor, *, group: int, values_TD: Tensor, scales_TB: Tensor) -> None:
    """View each row as groups, zeros added at its end; zeros change no amax."""
    num_tokens, num_columns = x_TD.shape
    num_groups = scales_TB.shape[1]
    x_TBC = pad(x_TD.float(), (0, num_groups * group - num_columns)).view(num_tokens, -1, group)
    scale_TB1 = x_TBC.abs().amax(dim=-1, keepdim=True).clamp_min(MIN_AMAX) / E4M3_MAX
    scaled_TBC = (x_TBC / scale_TB1).clamp(-E4M3_MAX, E4M3_MAX)
    values_TD.copy_(scaled_TBC.to(torch.float8_e4m3fn).view(num_tokens, -1)[:, :num_columns])
    scales_TB.copy_(scale_TB1.squeeze(-1))


register(
    Implementation(
        operation="quantize_activation",
        name="torch",
        function=quantize_activation,
        band=Band.PORTABLE,
        note="all groups at once",
    )
)
