"""Rotary embedding and KV write with torch operators: runs anywhere, all tokens at once."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.registry import Band, Implementation, register
from rose.kernels.rope_kv_write.reference import rotate


def rope_kv_write(
    qkv_TF: Tensor, positions_T: Tensor, cos_sin_PD: Tensor, slots_T: Tensor, *, kv_pages: Tensor
) -> None:
    """Rotate all heads, then scatter k and v to the slots that are kept."""
    kv_heads, page_tokens, head_dim = kv_pages.shape[2:]
    x_TAD = qkv_TF.unflatten(1, (-1, head_dim))
    heads = x_TAD.shape[1] - 2 * kv_heads
    cos_sin_T1D = cos_sin_PD[positions_T].unsqueeze(1)
    rotated_TAD = rotate(x_TAD[:, : heads + kv_heads], cos_sin_T1D)
    x_TAD[:, :heads] = rotated_TAD[:, :heads].to(qkv_TF.dtype)
    kept = torch.nonzero(slots_T >= 0).squeeze(1)
    page = torch.div(slots_T[kept], page_tokens, rounding_mode="floor")
    offset = slots_T[kept] - page * page_tokens
    kv_pages[page, 0, :, offset] = rotated_TAD[kept, heads:].to(kv_pages.dtype)
    kv_pages[page, 1, :, offset] = x_TAD[kept, heads + kv_heads :].to(kv_pages.dtype)


register(
    Implementation(
        operation="rope_kv_write",
        name="torch",
        function=rope_kv_write,
        band=Band.PORTABLE,
        note="all tokens at once; asks the device which slots are kept, so not for graphs",
    )
)
