"""Definition of decode_begin: one row after the other, in Python numbers."""

from __future__ import annotations

from torch import Tensor


def reference(
    slots_S: Tensor,
    columns_KS: Tensor,
    ids_KS: Tensor,
    *,
    pages_KRP: Tensor,
    lengths_R: Tensor,
    last_tokens_R: Tensor,
    ints_IR: Tensor,
    floats_FR: Tensor,
    page_tokens: int,
    token_ids_S: Tensor,
    positions_S: Tensor,
    next_positions_S: Tensor,
    lengths_S: Tensor,
    tables_KSW: Tensor,
    kv_slots_KS: Tensor,
    seed_S: Tensor,
    top_k_S: Tensor,
    floats_FS: Tensor,
) -> None:
    """See the contract."""
    num_kinds, num_slots, _ = pages_KRP.shape
    for s, slot in enumerate(slots_S.tolist()):
        is_real = slot < num_slots - 1
        position = int(lengths_R[slot]) if is_real else 0
        token_ids_S[s] = max(0, int(last_tokens_R[slot])) if is_real else 0
        positions_S[s] = position
        next_positions_S[s] = lengths_S[s] = lengths_R[slot] = position + 1 if is_real else 0
        for k in range(num_kinds):
            if columns_KS[k, s] >= 0:
                pages_KRP[k, slot, columns_KS[k, s]] = ids_KS[k, s]
            tables_KSW[k, s] = pages_KRP[k, slot, : tables_KSW.shape[2]]
            page = int(pages_KRP[k, slot, position // page_tokens])
            kv_slots_KS[k, s] = page * page_tokens + position % page_tokens if is_real else -1
        seed_S[s], top_k_S[s] = ints_IR[0, slot], ints_IR[1, slot]
        floats_FS[:, s] = floats_FR[:, slot]
