"""Attention of decode for the batch-invariant mode on a CPU; the computation that prefill uses too."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.invariant_attention import attend, limits, workspace
from rose.kernels.registry import Band, Implementation, register


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
    """Give each sequence a tile of its own."""
    attend(
        q_SHD,
        kv_pages,
        page_table_SP,
        sinks_H,
        range(len(q_SHD) + 1),
        lengths_S.tolist(),
        scale=scale,
        window_tokens=window_tokens,
        out_THD=out_SHD,
    )


register(
    Implementation(
        operation="attention_decode",
        name="torch_invariant",
        function=attention_decode,
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
