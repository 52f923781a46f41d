"""Attention of prefill for the batch-invariant mode on a CPU; the computation that decode uses too."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.invariant_attention import attend, limits, workspace
from rose.kernels.registry import Band, Implementation, register


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
    """Cut each sequence's new tokens into tiles."""
    attend(
        q_THD,
        kv_pages,
        page_table_SP,
        sinks_H,
        query_starts_S1.tolist(),
        lengths_S.tolist(),
        scale=scale,
        window_tokens=window_tokens,
        out_THD=out_THD,
    )


register(
    Implementation(
        operation="attention_prefill",
        name="torch_invariant",
        function=attention_prefill,
        band=Band.PORTABLE,
        device="cpu",
        formats={
            "activation": frozenset({"float32", "bf16"}),
            "kv": frozenset({"float32", "bf16", "fp8_e4m3"}),
        },
        limits=limits,
        is_capturable=False,
        workspace=workspace,
        is_batch_invariant=True,
        note="products of a fixed shape, page by page",
    )
)
