"""Attention of one token per sequence by its formula: prefill attention of one query each."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.attention_prefill.reference import attend


def reference(
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
    """Attend sequence by sequence; see the contract."""
    for s, length in enumerate(lengths_S.tolist()):
        if length == 0:
            out_SHD[s] = 0
            continue
        out_1HD = attend(
            q_SHD[s : s + 1],
            kv_pages,
            page_table_SP[s],
            sinks_H,
            last=length,
            scale=scale,
            window_tokens=window_tokens,
        )
        out_SHD[s] = out_1HD[0].to(out_SHD.dtype)
