"""Attention for the batch-invariant mode on a CPU: one computation for prefill and decode, page by page.

The queries of a *tile* (a few tokens of one sequence, all heads of a kv head) meet one page of keys at a time, in
products of a fixed shape. The largest score is exact whatever the order; sums over pages go from the oldest to the
newest; a page of which a query sees nothing adds zeros, which changes no bit. So it does not matter with which queries
a query shares a tile, nor which pages that tile looks at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from rose.kernels.invariant import TILE_ROWS, equal_rows_problem, exp_
from rose.kernels.registry import Sizes

_KEY_BYTES = 4 << 20
"""Of gathered keys at once; a tile with a longer history takes what it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tiles that are attended at once.

    Shapes   N tiles, Q tokens in a tile, W page-table columns that the widest tile sees
             tokens_NQ    int64: rows of q; places past the end of a sequence repeat its last token
             is_real_NQ   bool: whether it is the token's own place
             position_NQ  int64;  sequence_N1  int64: rows of the page table;  column_NW  int64
    """

    tokens_NQ: Tensor
    is_real_NQ: Tensor
    position_NQ: Tensor
    sequence_N1: Tensor
    column_NW: Tensor


def tokens_per_tile(num_heads: int, num_kv_heads: int) -> int:
    """Return how many tokens of a sequence share a tile: with the heads of a kv head, whole `TILE_ROWS` rows."""
    return TILE_ROWS // gcd(TILE_ROWS, num_heads // num_kv_heads)


def limits(sizes: Sizes) -> str | None:
    """Say why this machine's library cannot serve these sizes, or None: both products of a tile are tried."""
    repeats = sizes["H"] // sizes["G"]
    rows = repeats * tokens_per_tile(sizes["H"], sizes["G"])
    scores = equal_rows_problem(rows, sizes["D"], sizes["L"])
    return scores or equal_rows_problem(rows, sizes["L"], sizes["D"])


@lru_cache(maxsize=4)
def parts(
    starts: tuple[int, ...],
    lengths: tuple[int, ...],
    *,
    per_tile: int,
    window_tokens: int | None,
    page_tokens: int,
    most_pages: int,
) -> list[Part]:
    """Cut new tokens into tiles and the tiles into parts; remembered, because the layers of a step ask alike.

    Units    starts: first row of q of each sequence, and the end; lengths: tokens of each, the new ones included;
             most_pages: pages of all tiles of a part, unless one tile needs more
    """
    rows = [
        (row, s, starts[s + 1])
        for s in range(len(lengths))
        for row in range(starts[s], starts[s + 1], per_tile)
    ]
    firsts = [lengths[s] - (end - row) for row, s, end in rows]
    lasts = [
        first + min(per_tile, e - row) - 1 for first, (row, _, e) in zip(firsts, rows, strict=True)
    ]
    window = window_tokens or 1 << 60
    begins = [max(0, first - window + 1) // page_tokens for first in firsts]
    widths = [
        max(0, last) // page_tokens - begin + 1 for begin, last in zip(begins, lasts, strict=True)
    ]
    row_N3, first_N, begin_N = torch.tensor(rows), torch.tensor(firsts), torch.tensor(begins)
    place_Q = torch.arange(per_tile)
    found = []
    for part in _parts(widths, most=most_pages):
        row_N1, sequence_N1, end_N1 = row_N3[part].split(1, dim=1)
        tokens_NQ = row_N1 + place_Q
        found.append(
            Part(
                tokens_NQ=torch.minimum(tokens_NQ, end_N1 - 1),
                is_real_NQ=tokens_NQ < end_N1,
                position_NQ=first_N[part].unsqueeze(1) + place_Q,
                sequence_N1=sequence_N1,
                column_NW=begin_N[part].unsqueeze(1) + torch.arange(max(widths[part])),
            )
        )
    return found


def attend(
    q_THD: Tensor,
    kv_pages: Tensor,
    page_table_SP: Tensor,
    sinks_H: Tensor,
    starts: Iterable[int],
    lengths: Iterable[int],
    *,
    scale: float,
    window_tokens: int | None,
    out_THD: Tensor,
) -> None:
    """Attend new tokens to their histories; see the contracts of attention_prefill and attention_decode.

    Units    starts and lengths as in `parts`
    """
    num_kv_heads, page_tokens, head_dim = kv_pages.shape[2:]
    column_bytes = 4 * num_kv_heads * page_tokens * head_dim
    for part in parts(
        tuple(starts),
        tuple(lengths),
        per_tile=tokens_per_tile(q_THD.shape[1], num_kv_heads),
        window_tokens=window_tokens,
        page_tokens=page_tokens,
        most_pages=max(1, _KEY_BYTES // column_bytes),
    ):
        # Places that no query sees hold any page.
        column_NW = part.column_NW.clamp_max(page_table_SP.shape[1] - 1)
        out_NQHD = _attend(
            q_THD[part.tokens_NQ].float(),
            kv_pages,
            page_table_SP[part.sequence_N1, column_NW].long().clamp_min_(0),
            sinks_H.float(),
            key_NWL=(part.column_NW * page_tokens).unsqueeze(2) + torch.arange(page_tokens),
            position_NQ=part.position_NQ,
            scale=scale,
            window_tokens=window_tokens,
        )
        out_THD[part.tokens_NQ[part.is_real_NQ]] = out_NQHD[part.is_real_NQ].to(out_THD.dtype)


def _parts(widths: list[int], *, most: int) -> Iterator[slice]:
    """Yield runs of tiles whose pages, all as many as the widest has, are at most `most`."""
    begin = widest = 0
    for i, width in enumerate(widths):
        widest = max(widest, width)
        if i > begin and (i - begin + 1) * widest > most:
            yield slice(begin, i)
            begin, widest = i, width
    if begin < len(widths):
        yield slice(begin, len(widths))


def _attend(
    q_NQHD: Tensor,
    kv_pages: Tensor,
    page_NW: Tensor,
    sinks_H: Tensor,
    *,
    key_NWL: Tensor,
    position_NQ: Tensor,
    scale: float,
    window_tokens: int | None,
) -> Tensor:
    num_tiles, per_tile, num_heads, head_dim = q_NQHD.shape
    num_kv_heads = kv_pages.shape[2]
    repeats, num_pages = num_heads // num_kv_heads, page_NW.shape[1]
    q_NGMD = q_NQHD.unflatten(2, (num_kv_heads, repeats)).transpose(1, 2).flatten(2, 3)
    # One product a tile, page and kv head: [M, D] x [D, L], then [M, L] x [L, D].
    shape = (num_tiles, num_pages, num_kv_heads)
    q_BMD = q_NGMD.unsqueeze(1).expand(*shape, -1, -1).reshape(-1, per_tile * repeats, head_dim)
    k_BLD, v_BLD = (kv_pages[:, i][page_NW].float().flatten(0, 2) for i in (0, 1))
    score_NWGML = torch.bmm(q_BMD, k_BLD.mT).unflatten(0, shape).mul_(scale)
    key_NW1L, position_N1Q1 = key_NWL.unsqueeze(2), position_NQ[:, None, :, None]
    is_hidden_NWQL = key_NW1L > position_N1Q1
    if window_tokens is not None:
        is_hidden_NWQL |= key_NW1L <= position_N1Q1 - window_tokens
    is_hidden_NW1ML = is_hidden_NWQL.repeat_interleave(repeats, dim=2).unsqueeze(2)
    score_NWGML.masked_fill_(is_hidden_NW1ML, -torch.inf)
    sink_GM = sinks_H.view(num_kv_heads, repeats).repeat(1, per_tile)
    most_NGM = torch.maximum(score_NWGML.amax(dim=(1, 4)), sink_GM)
    weight_NWGML = exp_(score_NWGML.sub_(most_NGM[:, None, :, :, None]))
    weight_NWGML.masked_fill_(is_hidden_NW1ML, 0.0)
    total_NGM = exp_(sink_GM - most_NGM).add_(_over_pages(weight_NWGML.sum(dim=-1)))
    out_BMD = torch.bmm(weight_NWGML.flatten(0, 2), v_BLD)
    out_NGMD = _over_pages(out_BMD.unflatten(0, shape)).div_(total_NGM.unsqueeze(-1))
    out_NGQRD = out_NGMD.unflatten(2, (per_tile, repeats))
    return out_NGQRD.transpose(1, 2).flatten(2, 3)


def _over_pages(x_NW: Tensor) -> Tensor:
    """Sum over axis 1 from the oldest page to the newest."""
    return x_NW.cumsum(dim=1)[:, -1] if x_NW.shape[1] > 1 else x_NW[:, 0].clone()


def workspace(sizes: Sizes, _rows: int, longest: int) -> int:
    """Bytes of a call: keys and values of a part, scores with what their exponentials need, outputs of each page."""
    heads, kv_heads, head_dim, page_tokens = (sizes[name] for name in "HGDL")
    keys = max(_KEY_BYTES, 4 * kv_heads * (longest + page_tokens) * head_dim)
    rows = heads // kv_heads * tokens_per_tile(heads, kv_heads)
    return 5 * keys // 2 + 3 * keys * rows // head_dim + 2 * keys * rows // page_tokens
