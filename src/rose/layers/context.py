"""What a forward pass knows besides the tokens: one object, passed to every layer.

Tokens of a step are laid out in one row of T: first the decode sequences with one token each, then the
prefill sequences with their chunks. Attention splits there; everything else treats all T alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names of the layer kinds are read by the scheduler, which knows no torch
    from torch import Tensor

FULL = "full"
WINDOW = "window"
"""Full-attention layers keep every page; window layers only the pages their window reaches."""


@dataclass(slots=True, kw_only=True)
class KindContext:
    """Where the KV of one layer kind is.

    Shapes   S sequences (decode first), P page-table columns, T new tokens
             page_table_SP  int32; entries past the length and behind the window hold any page or -1
             slots_T        int64: page * page_tokens + offset, where the new token's k and v go; -1: nowhere
    """

    page_table_SP: Tensor
    slots_T: Tensor


@dataclass(slots=True, kw_only=True)
class ForwardContext:
    """One step, as tensors.

    Shapes   T new tokens, S sequences of which the first `num_decode` decode, N prefill sequences
             positions_T      int64
             lengths_S        int32: tokens with the new ones; 0: padding row of a graph
             query_starts_N1  int32 [N + 1]: rows of the prefill sequences, counted from row `num_decode`
             kv_pages         per layer [pages, 2, G, L, D]
    """

    phase: str
    """decode (one new token per sequence, nothing else) or prefill (anything with a chunk in it)."""
    num_tokens: int
    num_decode: int
    max_query_tokens: int
    """Most new tokens of one prefill sequence; 0 without any."""
    max_length: int
    """No length passes this; what decode launches rely on."""
    positions_T: Tensor
    lengths_S: Tensor
    query_starts_N1: Tensor
    kinds: dict[str, KindContext]
    kv_pages: list[Tensor]
