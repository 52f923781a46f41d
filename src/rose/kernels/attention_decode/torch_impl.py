"""Attention of decode with torch operators: runs anywhere, all sequences at once over gathered pages.

The gather is as wide as `max_length` or the window allows, so the work is that of the longest sequence
for each of them; nothing is asked of the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.registry import Band, Implementation, register
from rose.utils.math import ceil_div


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
    """Gather the columns that any token may see, mask, softmax with the sink as one more column."""
    wide = torch.float64 if q_SHD.dtype == torch.float64 else torch.float32
    num_sequences = q_SHD.shape[0]
    num_kv_heads, page_tokens = kv_pages.shape[2:4]
    length_S1 = lengths_S.long().unsqueeze(1)
    num_columns = min(ceil_div(max_length, page_tokens), page_table_SP.shape[1])
    column_SW = torch.arange(num_columns, device=q_SHD.device).expand(num_sequences, -1)
    if window_tokens is not None:
        reach = min(ceil_div(window_tokens - 1, page_tokens) + 1, num_columns)
        first_S1 = (length_S1 - window_tokens).clamp_min(0) // page_tokens
        column_SW = first_S1 + column_SW[:, :reach]
    last_column = page_table_SP.shape[1] - 1
    page_SW = page_table_SP.gather(1, column_SW.clamp_max(last_column)).long().clamp_min(0)
    key_SK = column_SW.unsqueeze(2) * page_tokens + torch.arange(page_tokens, device=q_SHD.device)
    key_SK = key_SK.flatten(1)
    is_seen_SK = key_SK < length_S1
    if window_tokens is not None:
        is_seen_SK &= key_SK >= length_S1 - window_tokens
    kv = kv_pages[page_SW].to(wide)  # [S, W, 2, G, L, D]
    k_SGKD, v_SGKD = kv.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    q_SGRD = q_SHD.to(wide).unflatten(1, (num_kv_heads, -1))
    scores_SGRK = scale * (q_SGRD @ k_SGKD.mT)
    scores_SGRK = scores_SGRK.masked_fill(~is_seen_SK[:, None, None], -torch.inf)
    sink_SGR1 = sinks_H.to(wide).view(1, num_kv_heads, -1, 1).expand(num_sequences, -1, -1, 1)
    weights_SGRK = torch.cat([scores_SGRK, sink_SGR1], dim=-1).softmax(dim=-1)[..., :-1]
    out_SHD.copy_((weights_SGRK @ v_SGKD).flatten(1, 2))


register(
    Implementation(
        operation="attention_decode",
        name="torch",
        function=attention_decode,
        band=Band.PORTABLE,
        note="all sequences at once over gathered pages, as wide as the longest may be",
    )
)
