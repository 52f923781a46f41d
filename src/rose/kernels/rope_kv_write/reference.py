"""Rotary embedding and KV write by their formulas, token by token (float64 stays float64)."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    qkv_TF: Tensor, positions_T: Tensor, cos_sin_PD: Tensor, slots_T: Tensor, *, kv_pages: Tensor
) -> None:
    """Rotate q in place, write rotated k and v of each token to its slot; see the contract."""
    kv_heads, page_tokens, head_dim = kv_pages.shape[2:]
    heads = qkv_TF.shape[1] // head_dim - 2 * kv_heads
    for t, slot in enumerate(slots_T.tolist()):
        q_HD, k_GD, v_GD = qkv_TF[t].view(-1, head_dim).split([heads, kv_heads, kv_heads])
        cos_sin_D = cos_sin_PD[positions_T[t]]
        q_HD.copy_(rotate(q_HD, cos_sin_D))
        if slot >= 0:
            page, offset = divmod(slot, page_tokens)
            kv_pages[page, 0, :, offset] = rotate(k_GD, cos_sin_D).to(kv_pages.dtype)
            kv_pages[page, 1, :, offset] = v_GD.to(kv_pages.dtype)


def rotate(x_HD: Tensor, cos_sin_D: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of the last axis, in float32 or wider."""
    wide = torch.float64 if x_HD.dtype == torch.float64 else torch.float32
    cos, sin = cos_sin_D.to(wide).chunk(2, dim=-1)
    low, high = x_HD.to(wide).chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
