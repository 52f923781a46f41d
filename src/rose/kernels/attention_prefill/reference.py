"""Attention over paged history by its formula, one sequence after the other (float64 stays float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.utils.math import ceil_div

CHUNK_QUERIES = 256
"""Queries at once; only a bound on memory, a long sequence has billions of scores."""


def reference(
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
    """Gather the keys of each sequence, mask, softmax with the sink as one more column; see the contract."""
    starts = query_starts_S1.tolist()
    for s, length in enumerate(lengths_S.tolist()):
        for begin in range(starts[s], starts[s + 1], CHUNK_QUERIES):
            end = min(begin + CHUNK_QUERIES, starts[s + 1])
            last = length - (starts[s + 1] - end)
            out_THD[begin:end] = attend(
                q_THD[begin:end],
                kv_pages,
                page_table_SP[s],
                sinks_H,
                last=last,
                scale=scale,
                window_tokens=window_tokens,
            ).to(out_THD.dtype)


def attend(
    q_QHD: Tensor,
    kv_pages: Tensor,
    page_table_P: Tensor,
    sinks_H: Tensor,
    *,
    last: int,
    scale: float,
    window_tokens: int | None,
) -> Tensor:
    """Return [Q, H, D]: queries at positions last - Q .. last - 1 of one sequence, attended."""
    wide = torch.float64 if q_QHD.dtype == torch.float64 else torch.float32
    num_queries, num_heads, head_dim = q_QHD.shape
    num_kv_heads, page_tokens = kv_pages.shape[2:4]
    first = last - num_queries
    column = 0 if window_tokens is None else max(0, first - window_tokens + 1) // page_tokens
    pages = page_table_P[column : ceil_div(last, page_tokens)].long()
    k_GKD, v_GKD = kv_pages[pages].to(wide).permute(1, 2, 0, 3, 4).flatten(2, 3)
    device = q_QHD.device
    key_K = column * page_tokens + torch.arange(k_GKD.shape[1], device=device)
    query_Q1 = torch.arange(first, last, device=device).unsqueeze(1)
    is_seen_QK = key_K <= query_Q1
    if window_tokens is not None:
        is_seen_QK &= key_K > query_Q1 - window_tokens
    q_GRQD = q_QHD.to(wide).view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores_GRQK = scale * (q_GRQD @ k_GKD.unsqueeze(1).mT)
    scores_GRQK = scores_GRQK.masked_fill(~is_seen_QK, -torch.inf)
    sink_GRQ1 = sinks_H.to(wide).view(num_kv_heads, -1, 1, 1).expand(-1, -1, num_queries, 1)
    weights_GRQK = torch.cat([scores_GRQK, sink_GRQ1], dim=-1).softmax(dim=-1)[..., :-1]
    out_GRQD = weights_GRQK @ v_GKD.unsqueeze(1)
    return out_GRQD.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)
