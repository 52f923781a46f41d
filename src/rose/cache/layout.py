"""Shapes and bytes of the KV cache, per layer kind. Plain numbers: knows no tensors and no sequences.

Every layer of a kind has pages of the same ids, so one page id stands for the same tokens in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.config.cache import CacheConfig
from rose.config.model import ModelConfig
from rose.layers.context import FULL, WINDOW
from rose.utils.dtypes import BITS_PER_ELEMENT
from rose.utils.math import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class KindLayout:
    """The pages of one layer kind."""

    kind: str
    layers: tuple[int, ...]
    """Indices of the layers of this kind."""
    window_tokens: int | None
    """Tokens that the widest of these layers sees, the newest included; None: all."""
    page_tokens: int
    num_kv_heads: int
    """Of this rank."""
    head_dim: int
    element: str
    """Type of the numbers, a name of utils/dtypes.py."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers of the kind: 2 (k, v) x heads x tokens x head size x element."""
        elements = 2 * self.num_kv_heads * self.page_tokens * self.head_dim
        return len(self.layers) * elements * BITS_PER_ELEMENT[self.element] // 8

    def shape(self, num_pages: int) -> tuple[int, int, int, int, int]:
        """Return the shape of one layer's tensor, [pages, 2, G, L, D] as in the kernels' contracts."""
        return (num_pages, 2, self.num_kv_heads, self.page_tokens, self.head_dim)

    def first_needed_column(self, position: int) -> int:
        """Return the first page-table column that a query at `position`, or any later one, reads."""
        if self.window_tokens is None:
            return 0
        return max(0, position - self.window_tokens + 1) // self.page_tokens

    def most_pages(self, num_tokens: int, chunk_tokens: int) -> int:
        """Return the most pages that a sequence of `num_tokens` holds when computed in such chunks."""
        if self.window_tokens is None:
            return ceil_div(num_tokens, self.page_tokens)
        # Window and chunk span w - 1 + c tokens, which touch one page more than they fill when unaligned.
        span = min(num_tokens, self.window_tokens - 1 + chunk_tokens)
        return min(ceil_div(num_tokens, self.page_tokens), ceil_div(span, self.page_tokens) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """All kinds that a model has; a kind without layers is left out."""

    kinds: tuple[KindLayout, ...]
    page_tokens: int

    @classmethod
    def of(
        cls, model: ModelConfig, cache: CacheConfig, *, kv_element: str, tp: int = 1
    ) -> CacheLayout:
        """Read the layout off a model's sizes, for one of `tp` ranks."""
        kinds = []
        for kind, is_windowed in ((FULL, False), (WINDOW, True)):
            layers = [
                i for i, w in enumerate(model.window_tokens) if (w is not None) == is_windowed
            ]
            windows = [w for w in model.window_tokens if w is not None]
            if not layers:
                continue
            kinds.append(
                KindLayout(
                    kind=kind,
                    layers=tuple(layers),
                    window_tokens=max(windows) if is_windowed else None,
                    page_tokens=cache.page_tokens,
                    num_kv_heads=max(1, model.num_kv_heads // tp),
                    head_dim=model.head_dim,
                    element=kv_element,
                )
            )
        return cls(kinds=tuple(kinds), page_tokens=cache.page_tokens)
