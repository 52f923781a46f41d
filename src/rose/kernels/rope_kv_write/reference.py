"""Rotary embedding and KV write by their formulas (float64 stays float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.formats import to_e4m3


def reference(
    qkv_TF: Tensor, positions_T: Tensor, cos_sin_PD: Tensor, slots_T: Tensor, *, kv_pages: Tensor
) -> None:
    """Rotate q in place; write rotated k, and v, of each kept token to its slot; see the contract."""
    kv_heads, page_tokens, head_dim = kv_pages.shape[2:]
    x_TAD = qkv_TF.unflatten(1, (-1, head_dim))
    q_THD, k_TGD, v_TGD = x_TAD.split([x_TAD.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    cos_sin_T1D = cos_sin_PD[positions_T].unsqueeze(1)
    q_THD.copy_(rotate(q_THD, cos_sin_T1D))
    kept = torch.nonzero(slots_T >= 0).squeeze(1)
    page = slots_T[kept] // page_tokens
    offset = slots_T[kept] % page_tokens
    k_KGD = rotate(k_TGD[kept], cos_sin_T1D[kept])
    kv_pages[page, 0, :, offset] = _stored(k_KGD, kv_pages.dtype)
    kv_pages[page, 1, :, offset] = _stored(v_TGD[kept], kv_pages.dtype)


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    return to_e4m3(x) if dtype == torch.float8_e4m3fn else x.to(dtype)


def rotate(x_HD: Tensor, cos_sin_D: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of the last axis, in float32 or wider."""
    wide = torch.float64 if x_HD.dtype == torch.float64 else torch.float32
    cos, sin = cos_sin_D.to(wide).chunk(2, dim=-1)
    low, high = x_HD.to(wide).chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
