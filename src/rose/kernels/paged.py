"""Random paged KV for the cases of attention and of KV writes: pages in disorder, freed entries, junk.

Junk: slots that hold no token of the sequence are filled with large finite numbers. A kernel that lets
one of them into a sum shows it; memory of a real pool is finite too, so no kernel has to guard against NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rose.kernels.draw import normal
from rose.kernels.formats import FORMATS, to_e4m3
from rose.utils.math import ceil_div

JUNK = 300.0


def first_column(start: int, window_tokens: int | None, page_tokens: int) -> int:
    """Return the first page-table column that a query at position `start` may read."""
    return 0 if window_tokens is None else max(0, start - window_tokens + 1) // page_tokens


def draw_kv(*shape: int, kv_format: str, source: torch.Generator, scale: float = 1.0) -> Tensor:
    """Draw normal numbers of standard deviation `scale` in a format of KV."""
    element = FORMATS[kv_format].element
    drawn = "bf16" if element == "e4m3" else element  # torch draws no E4M3
    numbers = normal(*shape, source=source, dtype=drawn, scale=scale)
    return to_e4m3(numbers) if element == "e4m3" else numbers


def draw_pages(
    lengths: Sequence[int],
    starts: Sequence[int],
    *,
    page_tokens: int,
    kv_heads: int,
    head_dim: int,
    window_tokens: int | None,
    kv_format: str,
    source: torch.Generator,
    spare_columns: int = 2,
) -> tuple[Tensor, Tensor]:
    """Draw kv_pages [pages, 2, G, L, D] and page_table_SP for sequences of these lengths.

    `starts`: position of the first new token of each sequence; pages wholly before its window are freed
    (-1), as are `spare_columns` columns past the end. Page ids are a random permutation.
    """
    device = source.device
    owned = [
        range(first_column(start, window_tokens, page_tokens), ceil_div(length, page_tokens))
        for length, start in zip(lengths, starts, strict=True)
    ]
    num_pages = sum(len(columns) for columns in owned) + 1  # page 0 belongs to nobody
    order = 1 + torch.randperm(num_pages - 1, generator=source, device=device).cpu()
    num_columns = max(ceil_div(length, page_tokens) for length in lengths) + spare_columns
    table_SP = torch.full((len(lengths), num_columns), -1, dtype=torch.int32)
    shape = (num_pages, 2, kv_heads, page_tokens, head_dim)
    kv_pages = draw_kv(*shape, kv_format=kv_format, source=source)
    kv_pages[0] = JUNK
    next_page = 0
    for s, (columns, length) in enumerate(zip(owned, lengths, strict=True)):
        pages = order[next_page : next_page + len(columns)]
        next_page += len(columns)
        table_SP[s, columns.start : columns.stop] = pages.int()
        tail = length % page_tokens
        if tail and len(columns):
            kv_pages[int(pages[-1]), :, :, tail:] = JUNK
    return kv_pages, table_SP.to(device)
