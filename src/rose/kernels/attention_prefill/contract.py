"""Attention of several new tokens per sequence over its paged history: prefill, chunked or whole."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.registry import FormatNames, Operation, Sizes


def attention_prefill(
    q_THD: Tensor,
    kv_pages: Tensor,
    page_table_SP: Tensor,
    query_starts_S1: Tensor,
    lengths_S: Tensor,
    sinks_H: Tensor,
    *,
    scale: float,
    window_tokens: int | None,
    max_query_tokens: int,
    out_THD: Tensor,
) -> None:
    """Attend every new token to the tokens at and before its position.

    Shapes   T new tokens of all sequences, S sequences, H query heads, G kv heads (H % G == 0), D head size,
             P page-table columns, L tokens per page
             q_THD           activation dtype, rotary applied; token stride may exceed H D, heads contiguous
             kv_pages        [pages, 2, G, L, D]: k at 0, v at 1; bf16, float32, float64, or E4M3 without scales;
                             holds the new tokens too; unwritten slots hold junk, but finite junk
             page_table_SP   int32; entry j holds tokens j L .. j L + L - 1; entries wholly outside every
                             window may be -1 and are never read
             query_starts_S1 int32 [S + 1]: sequence s owns new tokens starts[s] .. starts[s + 1] - 1, its last
             lengths_S       int32: tokens of the sequence, the new ones included
             sinks_H         float32: one more logit in the softmax (not scaled, never masked), with no value
    Units    scale multiplies q.k; window_tokens w: position p sees p - w + 1 .. p; None: all of 0 .. p
             max_query_tokens: the most new tokens of one sequence (a host number, for the launch)
    Aliasing writes out_THD (contiguous)
    Source   gpt-oss model card, attention section; models/gpt_oss/reference.py
    """


def _validate(_formats: FormatNames, sizes: Sizes) -> list[str]:
    if sizes["H"] % sizes["G"]:
        return [f"{sizes['H']} query heads are no multiple of {sizes['G']} kv heads"]
    return []


OPERATION = Operation(
    name="attention_prefill",
    signature=attention_prefill,
    sizes=("H", "G", "D", "L"),
    outputs=("out_THD",),
    formats=("activation", "kv"),
    validate=_validate,
)
