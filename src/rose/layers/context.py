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
class SampledRows:
    """The rows of a step after which a token is sampled: of a sequence its newest token, or none.

    Shapes   M rows that sample, in the order of the step
             rows_M       int64, of the T new tokens
             sequences_M  int64, of the S sequences: whose they are
    """

    rows_M: Tensor
    sequences_M: Tensor


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
    sampled: SampledRows | None = None
    """The rows whose hidden states are asked for; None: all of them, as in decode and for tools."""

    def alone(self, sampled: SampledRows) -> ForwardContext:
        """Return these rows as a step of their own, one row a sequence, in a layer that has written their k and v.

        It keeps the phase: it runs with the kernels of prefill, attention aside, and so needs no others.
        """
        rows_M, sequences_M = sampled.rows_M, sampled.sequences_M
        num_rows = len(rows_M)
        return ForwardContext(
            phase=self.phase,
            num_tokens=num_rows,
            num_decode=num_rows,
            max_query_tokens=0,
            max_length=self.max_length,
            positions_T=self.positions_T.index_select(0, rows_M),
            lengths_S=self.lengths_S.index_select(0, sequences_M),
            query_starts_N1=self.query_starts_N1[:1],
            kinds={
                name: KindContext(
                    page_table_SP=kind.page_table_SP.index_select(0, sequences_M),
                    slots_T=kind.slots_T.index_select(0, rows_M),
                )
                for name, kind in self.kinds.items()
            },
            kv_pages=self.kv_pages,
        )
