"""Which pages each sequence holds, per layer kind; the host's mirror of the device's page tables.

Column j of a sequence stands for its tokens j L .. j L + L - 1 in every kind. Window layers give a page back
as soon as no later token can see it. A prefix cache will live here: `open` will return the columns that it
already holds and how many tokens need not be computed.
"""

from __future__ import annotations

from rose.cache.layout import CacheLayout
from rose.cache.pool import PagePool
from rose.utils.math import ceil_div

PageUpdates = dict[str, list[tuple[int, int]]]
"""Layer kind -> (column, page) to write before the step."""

_NEVER = 1 << 62


class SequencePages:
    """The pages of one sequence. Only PageTable changes it."""

    __slots__ = ("capacity_tokens", "columns", "first_held", "free_position")

    def __init__(self, num_kinds: int) -> None:
        self.columns: list[list[int]] = [[] for _ in range(num_kinds)]
        """Per kind: page of each column, -1 where freed."""
        self.first_held: list[int] = [0] * num_kinds
        self.capacity_tokens = 0
        """Tokens that the columns can hold; the same in every kind."""
        self.free_position = _NEVER
        """Once the next position to compute reaches it, some page is dead."""


class PageTable:
    """Allocates, grows and releases the pages of sequences over one pool per kind."""

    def __init__(self, layout: CacheLayout, num_pages: dict[str, int]) -> None:
        self.layout = layout
        self.pools = {k.kind: PagePool(k.kind, num_pages[k.kind]) for k in layout.kinds}
        self._page_tokens = layout.page_tokens
        self._kinds = [(k, self.pools[k.kind]) for k in layout.kinds]

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that fits with nothing else there."""
        sizes = [p.num_pages * self._page_tokens for k, p in self._kinds if k.window_tokens is None]
        return min(sizes, default=_NEVER)

    @property
    def num_used_pages(self) -> int:
        """Pages held, of the kind that fills first under load: full attention where there is one."""
        return self._kinds[0][1].num_used

    @property
    def num_pages(self) -> int:
        """Pages of that kind."""
        return self._kinds[0][1].num_pages

    def open(self) -> SequencePages:
        """Return the holder of a sequence that starts to run; it holds nothing yet."""
        return SequencePages(len(self._kinds))

    def has_room(self, num_tokens: int, *, spare_pages: int) -> bool:
        """Tell whether the kinds that keep all pages could hold a new sequence of so many tokens now.

        Units  spare_pages: pages that must stay free beside it
        """
        needed = ceil_div(num_tokens, self._page_tokens) + spare_pages
        return all(p.num_free >= needed for k, p in self._kinds if k.window_tokens is None)

    def reachable_tokens(self, pages: SequencePages, num_tokens: int) -> int:
        """Return up to how many tokens, at most `num_tokens`, the sequence could grow now."""
        columns = min(pool.num_free for _, pool in self._kinds)
        return min(num_tokens, pages.capacity_tokens + columns * self._page_tokens)

    def grow(self, pages: SequencePages, num_tokens: int) -> PageUpdates | None:
        """Add the columns for `num_tokens` in every kind, or return None and change nothing."""
        missing = ceil_div(num_tokens - pages.capacity_tokens, self._page_tokens)
        if missing <= 0:
            return {}
        if any(pool.num_free < missing for _, pool in self._kinds):
            return None
        updates: PageUpdates = {}
        for columns, (kind, pool) in zip(pages.columns, self._kinds, strict=True):
            taken = pool.allocate(missing)
            updates[kind.kind] = list(enumerate(taken, start=len(columns)))
            columns.extend(taken)
        pages.capacity_tokens += missing * self._page_tokens
        pages.free_position = self._next_free_position(pages)
        return updates

    def free_behind(self, pages: SequencePages, position: int) -> None:
        """Free the pages that no query at `position` or later sees. The device's table keeps their stale ids.

        HAZARD: steps already enqueued may still read them; a later step of the same stream may not run
        before those, so reuse is safe there and only there.
        """
        for i, (kind, pool) in enumerate(self._kinds):
            first, columns = pages.first_held[i], pages.columns[i]
            needed = min(kind.first_needed_column(position), len(columns))
            if needed <= first:
                continue
            pool.free(columns[first:needed])
            columns[first:needed] = [-1] * (needed - first)
            pages.first_held[i] = needed
        pages.free_position = self._next_free_position(pages)

    def close(self, pages: SequencePages) -> None:
        """Free everything the sequence holds; calling it again frees nothing."""
        for i, (_, pool) in enumerate(self._kinds):
            pool.free(pages.columns[i][pages.first_held[i] :])
            pages.columns[i] = []
            pages.first_held[i] = 0
        pages.capacity_tokens, pages.free_position = 0, _NEVER

    def _next_free_position(self, pages: SequencePages) -> int:
        positions = [
            # Column f is dead for a query at p when its last token (f + 1) L - 1 < p - w + 1.
            (pages.first_held[i] + 1) * self._page_tokens + kind.window_tokens - 1
            for i, (kind, _) in enumerate(self._kinds)
            if kind.window_tokens is not None
        ]
        return min(positions, default=_NEVER)
