"""Definition of mask_logits: one row after the other, bit by bit."""

from __future__ import annotations

from torch import Tensor


def reference(slots_S: Tensor, masks_RW: Tensor, *, logits_SV: Tensor) -> None:
    """See the contract."""
    for s, slot in enumerate(slots_S.tolist()):
        words = masks_RW[slot].tolist()
        banned = [i for i in range(logits_SV.shape[1]) if not words[i // 32] >> i % 32 & 1]
        logits_SV[s, banned] = float("-inf")
