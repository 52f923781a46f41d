"""RMSNorm by its formula, in float32 (float64 stays float64)."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    x_TD: Tensor, weight_D: Tensor, *, eps: float, residual_TD: Tensor | None, out_TD: Tensor
) -> None:
    """Add to the residual stream, then normalise; see the contract."""
    if residual_TD is not None:
        residual_TD += x_TD
        x_TD = residual_TD
    wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    t_TD = x_TD.to(wide)
    scale_T1 = torch.rsqrt(t_TD.square().mean(dim=-1, keepdim=True) + eps)
    out_TD.copy_(t_TD * scale_T1 * weight_D.to(wide))
