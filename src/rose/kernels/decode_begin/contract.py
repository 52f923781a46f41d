"""The start of a decode step: everything the step needs to know of its rows, read by slot on the device."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.registry import Operation


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
    """Write the new pages into the page tables, lengthen every sequence by one token, and gather its rows.

    Shapes   S rows of the step, R slots of which the last is for padding, K layer kinds, P page-table
             columns, W of them that the step reads, I = 2 and F = 3 sampling parameters
             slots_S       int64, all different but for padding rows, which have R - 1
             columns_KS    int64: page-table column that is new in this step; -1: none
             ids_KS        int64: the page for it
             pages_KRP     int32;  lengths_R int32, before this step;  last_tokens_R int64
             ints_IR       int64: seed, top_k;  floats_FR float32: temperature, top_p, min_p
             token_ids_S   int64: the last token of the slot; 0 where that is -1, as `sample` gives a row without one
             positions_S   int64: its position;  next_positions_S int64: position + 1
             lengths_S     int32: position + 1
             tables_KSW    int32: the first W columns of the row's table
             kv_slots_KS   int64: page * page_tokens + offset of the position
             seed_S int64, top_k_S int32, floats_FS float32: the slot's sampling parameters
    Units    padding rows have token 0, position 0, next position 0, length 0, kv slot -1; their table is that
             of the padding slot
    Aliasing writes the outputs; pages_KRP takes the new pages, lengths_R the new lengths (0 for padding)
    """


OPERATION = Operation(
    name="decode_begin",
    signature=decode_begin,
    sizes=("K",),
    outputs=(
        "token_ids_S",
        "positions_S",
        "next_positions_S",
        "lengths_S",
        "tables_KSW",
        "kv_slots_KS",
        "seed_S",
        "top_k_S",
        "floats_FS",
    ),
    inouts=("pages_KRP", "lengths_R"),
)
