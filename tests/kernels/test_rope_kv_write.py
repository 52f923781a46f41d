"""The reference of rope_kv_write is vectorised, so it is held against one token at a time, by hand."""

from __future__ import annotations

import torch

from rose.kernels.rope_kv_write.reference import reference


def test_each_token_turns_by_its_angle_and_lands_in_its_slot():
    heads, kv_heads, head_dim, page_tokens = 2, 1, 4, 16
    qkv_TF = torch.arange(3 * 16, dtype=torch.float64).view(3, 16)
    before = qkv_TF.clone()
    positions, slots = [2, 0, 5], [17, -1, 3]
    angles_PC = torch.arange(6, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1]).double()
    kv_pages = torch.full((2, 2, kv_heads, page_tokens, head_dim), -1.0, dtype=torch.float64)
    reference(
        qkv_TF,
        torch.tensor(positions),
        torch.cat([angles_PC.cos(), angles_PC.sin()], dim=1),
        torch.tensor(slots),
        kv_pages=kv_pages,
    )
    wanted = torch.full_like(kv_pages, -1.0)
    for t in range(3):
        x = before[t].view(4, head_dim)
        turned = torch.empty_like(x)
        for i in range(2):
            cos, sin = angles_PC[positions[t], i].cos(), angles_PC[positions[t], i].sin()
            turned[:, i] = x[:, i] * cos - x[:, i + 2] * sin
            turned[:, i + 2] = x[:, i + 2] * cos + x[:, i] * sin
        assert torch.allclose(qkv_TF[t].view(4, head_dim)[:heads], turned[:heads])
        if slots[t] >= 0:
            wanted[slots[t] // page_tokens, 0, 0, slots[t] % page_tokens] = turned[2]
            wanted[slots[t] // page_tokens, 1, 0, slots[t] % page_tokens] = x[3]
    assert torch.allclose(kv_pages, wanted)
