"""decode_begin with torch operators, all rows at once; about thirty small kernels on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.registry import Band, Implementation, register


def decode_begin(
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
    num_kinds, num_slots, num_columns = pages_KRP.shape
    is_real_S = slots_S < num_slots - 1
    before_S = lengths_R.index_select(0, slots_S).to(torch.int64) * is_real_S
    after_S = (before_S + 1) * is_real_S
    lengths_R.index_copy_(0, slots_S, after_S.to(torch.int32))
    positions_S.copy_(before_S)
    next_positions_S.copy_(after_S)
    lengths_S.copy_(after_S)
    token_ids_S.copy_((last_tokens_R.index_select(0, slots_S) * is_real_S).clamp_min_(0))
    columns_S, offsets_S = before_S // page_tokens, before_S % page_tokens
    for k in range(num_kinds):
        # Rows without a new page rewrite the cell of their position's column with what it holds.
        is_new_S = columns_KS[k] >= 0
        column_S = torch.where(is_new_S, columns_KS[k], columns_S)
        cells_S = slots_S * num_columns + column_S
        flat = pages_KRP[k].view(-1)
        ids_S = torch.where(is_new_S, ids_KS[k], flat.index_select(0, cells_S).to(torch.int64))
        flat.index_copy_(0, cells_S, ids_S.to(torch.int32))
        tables_KSW[k] = pages_KRP[k, :, : tables_KSW.shape[2]].index_select(0, slots_S)
        page_S = flat.index_select(0, slots_S * num_columns + columns_S)
        kv_slots_S = page_S.to(torch.int64) * page_tokens + offsets_S
        kv_slots_KS[k] = torch.where(is_real_S, kv_slots_S, -1)
    seed_S.copy_(ints_IR[0].index_select(0, slots_S))
    top_k_S.copy_(ints_IR[1].index_select(0, slots_S))
    floats_FS.copy_(floats_FR.index_select(1, slots_S))


register(
    Implementation(
        operation="decode_begin",
        name="torch",
        function=decode_begin,
        band=Band.PORTABLE,
        is_batch_invariant=True,
        note="all rows at once",
    )
)
