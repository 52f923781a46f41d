"""Quantisation of rows to E4M3 by its formula, and the rounding it amounts to."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.formats import E4M3_MAX, FORMATS
from rose.utils.math import ceil_div

MIN_AMAX = 1e-4
"""A group of zeros gets this amax, so that no scale is 0."""


def reference(x_TD: Tensor, *, group: int, values_TD: Tensor, scales_TB: Tensor) -> None:
    """Quantise each group of each row; see the contract."""
    for b in range(ceil_div(x_TD.shape[1], group)):
        columns = slice(b * group, (b + 1) * group)
        part_TC = x_TD[:, columns].float()
        scale_T1 = part_TC.abs().amax(dim=-1, keepdim=True).clamp_min(MIN_AMAX) / E4M3_MAX
        scaled_TC = (part_TC / scale_T1).clamp(-E4M3_MAX, E4M3_MAX)
        values_TD[:, columns] = scaled_TC.to(torch.float8_e4m3fn).to(values_TD.dtype)
        scales_TB[:, b] = scale_T1[:, 0]


def rounded(x_TD: Tensor, format_name: str) -> Tensor:
    """Return what is left of float32 rows after a trip through a format of activations, as float32.

    Source  what an implementation that declares `activation_rounding` computes with.
    """
    kind = FORMATS[format_name]
    if kind.block is None:
        return x_TD if format_name == "float32" else x_TD.to(torch.bfloat16).float()
    group = min(kind.block[1], x_TD.shape[1])
    values_TD = torch.empty_like(x_TD, dtype=torch.float8_e4m3fn)
    scales_TB = x_TD.new_empty(x_TD.shape[0], ceil_div(x_TD.shape[1], group))
    reference(x_TD, group=group, values_TD=values_TD, scales_TB=scales_TB)
    spread_TD = scales_TB.repeat_interleave(group, dim=1)[:, : x_TD.shape[1]]
    return values_TD.float() * spread_TD
