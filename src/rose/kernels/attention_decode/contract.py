"""Attention of one new token per sequence over its paged history."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.registry import FormatNames, Operation, Sizes


def attention_decode(
    q_SHD: Tensor,
    kv_pages: Tensor,
    page_table_SP: Tensor,
    lengths_S: Tensor,
    sinks_H: Tensor,
    *,
    scale: float,
    window_tokens: int | None,
    max_length: int,
    out_SHD: Tensor,
) -> None:
    """Attend the newest token of each sequence to its history.

    Shapes   S sequences, H query heads, G kv heads (H % G == 0), D head size, P page-table columns,
             L tokens per page
             q_SHD          activation dtype, rotary applied; sequence stride may exceed H D, heads contiguous
             kv_pages       [pages, 2, G, L, D]: k at 0, v at 1; bf16, float32, float64, or E4M3 without scales;
                            holds the new token too; unwritten slots hold junk, but finite junk
             page_table_SP  int32, as in attention_prefill
             lengths_S      int32: tokens of the sequence, the new one included; 0: padding row of a graph,
                            its output is zeros
             sinks_H        float32, as in attention_prefill; counted exactly once also when the KV is split
    Units    max_length: upper bound of lengths_S that the launch may rely on (a graph is captured for it)
    Aliasing writes out_SHD (contiguous); workspace is allocated by torch's caching allocator, which is safe
             inside graph capture
    Source   gpt-oss model card, attention section; models/gpt_oss/reference.py
    """


def _validate(_formats: FormatNames, sizes: Sizes) -> list[str]:
    if sizes["H"] % sizes["G"]:
        return [f"{sizes['H']} query heads are no multiple of {sizes['G']} kv heads"]
    return []


OPERATION = Operation(
    name="attention_decode",
    signature=attention_decode,
    sizes=("H", "G", "D", "L"),
    outputs=("out_SHD",),
    formats=("activation", "kv"),
    validate=_validate,
)
