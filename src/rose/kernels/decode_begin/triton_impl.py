"""decode_begin in Triton: one program per row; a captured step starts with this one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rose.kernels.registry import Band, Implementation, register
from rose.utils.math import next_power_of_two

_BLOCK = 2048
"""Page-table columns per load: the whole table of a 131072-token context with pages of 64."""


@triton.jit(
    # Parts of what was received, an odd number of rows apart where the rows are odd; read and written one by one.
    do_not_specialize_on_alignment=[
        "slots_ptr", "columns_ptr", "ids_ptr",
        "positions_ptr", "next_positions_ptr", "kv_slots_ptr", "seed_ptr", "top_k_ptr",
    ],
)  # fmt: skip
def _kernel(
    slots_ptr, columns_ptr, ids_ptr,
    pages_ptr, lengths_ptr, last_tokens_ptr, ints_ptr, floats_ptr,
    token_ids_ptr, positions_ptr, next_positions_ptr, new_lengths_ptr,
    tables_ptr, kv_slots_ptr, seed_ptr, top_k_ptr, row_floats_ptr,
    num_rows, num_slots, num_columns, columns_stride, ids_stride, width,
    KINDS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    is_real = slot < num_slots - 1
    position = tl.where(is_real, tl.load(lengths_ptr + slot), 0).to(tl.int64)
    after = tl.where(is_real, position + 1, 0)
    token = tl.maximum(tl.load(last_tokens_ptr + slot), 0)
    tl.store(token_ids_ptr + row, tl.where(is_real, token, 0))
    tl.store(positions_ptr + row, position)
    tl.store(next_positions_ptr + row, after)
    tl.store(new_lengths_ptr + row, after.to(tl.int32))
    tl.store(seed_ptr + row, tl.load(ints_ptr + slot))
    tl.store(top_k_ptr + row, tl.load(ints_ptr + num_slots + slot).to(tl.int32))
    for f in tl.static_range(3):
        value = tl.load(floats_ptr + f * num_slots + slot)
        tl.store(row_floats_ptr + f * num_rows + row, value)
    for k in tl.static_range(KINDS):
        column = tl.load(columns_ptr + k * columns_stride + row)
        page = tl.load(ids_ptr + k * ids_stride + row).to(tl.int32)
        table_ptr = pages_ptr + (k * num_slots + slot) * num_columns
        # Old pages are loaded and the new one is put in on the way: its store need not come first.
        here = tl.where(column == position // PAGE, page, tl.load(table_ptr + position // PAGE))
        kv_slot = here.to(tl.int64) * PAGE + position % PAGE
        tl.store(kv_slots_ptr + k * num_rows + row, tl.where(is_real, kv_slot, -1))
        for start in range(0, width, BLOCK):
            i = start + tl.arange(0, BLOCK)
            ids = tl.load(table_ptr + i, mask=i < width, other=-1)
            ids = tl.where(i == column, page, ids)
            tl.store(tables_ptr + (k * num_rows + row) * width + i, ids, mask=i < width)
        tl.store(table_ptr + column, page, mask=column >= 0)
    # HAZARD: each warp loads the length for itself; without the barrier a late one could read the new one.
    # Other programs do not matter: only padding rows share a slot, whose length is 0 before and after.
    tl.debug_barrier()
    tl.store(lengths_ptr + slot, after.to(tl.int32))


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
    num_rows, width = tables_KSW.shape[1:]
    _kernel[(num_rows,)](
        slots_S, columns_KS, ids_KS,
        pages_KRP, lengths_R, last_tokens_R, ints_IR, floats_FR,
        token_ids_S, positions_S, next_positions_S, lengths_S,
        tables_KSW, kv_slots_KS, seed_S, top_k_S, floats_FS,
        num_rows, num_slots, num_columns, columns_KS.stride(0), ids_KS.stride(0), width,
        KINDS=num_kinds, PAGE=page_tokens, BLOCK=min(_BLOCK, next_power_of_two(width)),
        num_warps=4,
    )  # fmt: skip


register(
    Implementation(
        operation="decode_begin",
        name="triton",
        function=decode_begin,
        band=Band.TUNED,
        device="cuda",
        min_capability=(8, 0),
        is_batch_invariant=True,
        note="one program per row",
    )
)
