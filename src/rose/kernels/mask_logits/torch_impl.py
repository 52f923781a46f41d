"""mask_logits with torch operators: runs anywhere; on a GPU it writes the bits out as 32-bit words first."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.registry import Band, Implementation, register


def mask_logits(slots_S: Tensor, masks_RW: Tensor, *, logits_SV: Tensor) -> None:
    """See the contract."""
    shifts_B = torch.arange(32, dtype=torch.int32, device=masks_RW.device)
    bits_SWB = masks_RW.index_select(0, slots_S).unsqueeze(2) >> shifts_B
    is_banned_SV = ((bits_SWB & 1) == 0).flatten(1)[:, : logits_SV.shape[1]]
    logits_SV.masked_fill_(is_banned_SV, float("-inf"))


register(
    Implementation(
        operation="mask_logits",
        name="torch",
        function=mask_logits,
        band=Band.PORTABLE,
        note="bits as words",
    )
)
