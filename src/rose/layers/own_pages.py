"""Contexts for a model without an engine: a few sequences, each with all the pages it will ever need.

For tests and tools. Serving uses the cache's pool, which shares and frees pages; here columns that a
window has left behind are only marked as freed, so that a kernel that reads them is caught.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rose.config.model import ModelConfig
from rose.layers.context import FULL, WINDOW, ForwardContext, KindContext
from rose.utils.math import ceil_div


class OwnPages:
    """Zeroed KV of `num_sequences` sequences of up to `max_tokens` tokens, and how far each has come."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_sequences: int,
        max_tokens: int,
        page_tokens: int,
        num_kv_heads: int | None = None,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> None:
        """Allocate; `num_kv_heads` of this rank, the model's by default."""
        self._window_tokens = max((w for w in config.window_tokens if w is not None), default=None)
        self._page_tokens, self._device = page_tokens, device
        num_columns = ceil_div(max_tokens, page_tokens)
        num_pages = num_sequences * num_columns
        # In descending order, so that no code can take a page for its column.
        pages = torch.arange(num_pages - 1, -1, -1, dtype=torch.int32, device=device)
        self._table_SP = pages.view(num_sequences, num_columns)
        shape = (
            num_pages,
            2,
            num_kv_heads or config.num_kv_heads,
            page_tokens,
            config.head_dim,
        )
        self.kv_pages = [
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)
        ]
        self.lengths = [0] * num_sequences

    def step(
        self, *, decode: Sequence[int] = (), prefill: Sequence[tuple[int, int]] = ()
    ) -> ForwardContext:
        """Return the context of a step and count its tokens in.

        `decode`: sequences with one new token; `prefill`: (sequence, new tokens). Token ids go in that order.
        """
        parts = [*((s, 1) for s in decode), *prefill]
        starts = [self.lengths[s] for s, _ in parts]
        for s, count in parts:
            self.lengths[s] += count
        counts = [count for _, count in parts]
        positions_T = torch.cat(
            [torch.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]
        ).to(self._device)
        rows = torch.tensor([s for s, _ in parts], device=self._device)
        table_SP = self._table_SP[rows]
        owner_T = torch.repeat_interleave(torch.tensor(counts)).to(self._device)
        page_T = table_SP[owner_T, positions_T // self._page_tokens].long()
        slots_T = page_T * self._page_tokens + positions_T % self._page_tokens
        lengths = [start + n for start, n in zip(starts, counts, strict=True)]
        num_decode, chunks = len(decode), counts[len(decode) :]
        return ForwardContext(
            phase="prefill" if prefill else "decode",
            num_tokens=sum(counts),
            num_decode=num_decode,
            max_query_tokens=max(chunks, default=0),
            max_length=max(lengths),
            positions_T=positions_T,
            lengths_S=torch.tensor(lengths, dtype=torch.int32, device=self._device),
            query_starts_N1=torch.tensor([0, *chunks], device=self._device).cumsum(0).int(),
            kinds={
                FULL: KindContext(page_table_SP=table_SP, slots_T=slots_T),
                WINDOW: KindContext(
                    page_table_SP=self._without_freed(table_SP, starts), slots_T=slots_T
                ),
            },
            kv_pages=self.kv_pages,
        )

    def _without_freed(self, table_SP: Tensor, starts: Sequence[int]) -> Tensor:
        """Mark the columns that no query of the step can see in its window."""
        if self._window_tokens is None:
            return table_SP
        first_seen_S = torch.tensor(starts, device=self._device) - self._window_tokens + 1
        first_column_S1 = (first_seen_S.clamp_min(0) // self._page_tokens).unsqueeze(1)
        column_P = torch.arange(table_SP.shape[1], device=self._device)
        return table_SP.masked_fill(column_P < first_column_S1, -1)
