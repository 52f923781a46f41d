"""Which pages each sequence holds, per layer kind; the host's mirror of the device's page tables.

Column j of a sequence stands for its tokens j L .. j L + L - 1 in every kind. Window layers give a page back
as soon as no later token can see it. With the prefix cache on, pages that are full are offered to later
sequences under a key: `find` looks up what a prompt shares with the past, `open` takes hold of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.cache.keys import PageKeys
from rose.cache.layout import CacheLayout, KindLayout
from rose.cache.pool import PagePool
from rose.utils.math import ceil_div

PageUpdates = dict[str, list[tuple[int, int]]]
"""Layer kind -> (column, page) to write before the step."""

_NEVER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """What the prefix cache has of a sequence; it holds nothing, so it is good until pages are allocated."""

    num_columns: int
    """Whole pages that need not be computed."""
    num_tokens: int
    columns: tuple[tuple[int, ...], ...]
    """Per kind: page of each of the columns, -1 where no later token looks."""
    num_known_columns: int
    """Columns that full attention would have; beyond num_columns where the window's pages are gone."""


class SequencePages:
    """The pages of one sequence. Only PageTable changes it."""

    __slots__ = (
        "capacity_tokens",
        "columns",
        "first_held",
        "free_position",
        "likely_hits",
        "num_registered",
    )

    def __init__(self, num_kinds: int) -> None:
        self.columns: list[list[int]] = [[] for _ in range(num_kinds)]
        """Per kind: page of each column, -1 where freed."""
        self.first_held: list[int] = [0] * num_kinds
        self.capacity_tokens = 0
        """Tokens that the columns can hold; the same in every kind."""
        self.free_position = _NEVER
        """Once the next position to compute reaches it, some page is dead."""
        self.num_registered = 0
        """Columns that later sequences can find, or that they would find elsewhere."""
        self.likely_hits: tuple[int, ...] = ()
        """Numbers of columns after which a later hit may well end."""


class PageTable:
    """Allocates, grows and releases the pages of sequences over one pool per kind."""

    def __init__(
        self, layout: CacheLayout, num_pages: dict[str, int], *, is_caching: bool = False
    ) -> None:
        self.layout = layout
        self.is_caching = is_caching
        """Whether full pages are kept for later sequences."""
        self.pools = {k.kind: PagePool(k.kind, num_pages[k.kind]) for k in layout.kinds}
        self._page_tokens = layout.page_tokens
        self._kinds = [(k, self.pools[k.kind]) for k in layout.kinds]
        self._nothing = Hit(
            num_columns=0, num_tokens=0, columns=((),) * len(self._kinds), num_known_columns=0
        )

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

    @property
    def num_idle_pages(self) -> int:
        """Pages of that kind that nobody holds and that a later prompt can find."""
        return self._kinds[0][1].num_idle

    @property
    def num_evictions(self) -> int:
        """Pages of all kinds that the prefix cache has lost to running sequences."""
        return sum(pool.num_evictions for _, pool in self._kinds)

    def find(self, keys: PageKeys, token_ids: list[int]) -> Hit:
        """Return the longest beginning that need not be computed; the last token always is.

        Full-attention layers need every page of it. Window layers need the pages of their last positions;
        where one is gone, the hit ends earlier, at the last point whose window is whole.
        """
        most = (len(token_ids) - 1) // self._page_tokens if self.is_caching else 0
        if most <= 0:
            return self._nothing
        known = most
        for kind, pool in self._kinds:
            if kind.window_tokens is None:
                known = self._num_known(pool, keys, token_ids, known)
        names = keys.up_to(known, token_ids, self._page_tokens)
        count, before = known, -1
        while count != before:
            before = count
            for kind, pool in self._kinds:
                if kind.window_tokens is not None:
                    count = self._whole_window(kind, pool, names, count)
        columns = []
        for kind, pool in self._kinds:
            first = min(count, kind.first_needed_column(count * self._page_tokens))
            columns.append((-1,) * first + tuple(pool.find_all(names[first:count])))
        return Hit(
            num_columns=count,
            num_tokens=count * self._page_tokens,
            columns=tuple(columns),
            num_known_columns=known,
        )

    def _num_known(self, pool: PagePool, keys: PageKeys, token_ids: list[int], most: int) -> int:
        """Return how many of the first `most` columns the pool has, up to the first that it lacks.

        No more keys are made than that takes: those of a long prompt that nobody has asked before would delay its
        first step by half a millisecond.
        """
        end = 0
        while end < most:
            start, end = end, min(most, 4 * end + 4)
            names = keys.up_to(end, token_ids, self._page_tokens)
            for column in range(start, end):
                if pool.find(names[column]) is None:
                    return column
        return most

    def _whole_window(
        self, kind: KindLayout, pool: PagePool, names: list[bytes], count: int
    ) -> int:
        """Return the most columns, at most `count`, after which the kind has all that a query looks at."""
        while count > 0:
            first = kind.first_needed_column(count * self._page_tokens)
            gone = next(
                (c for c in range(count - 1, first - 1, -1) if pool.find(names[c]) is None), None
            )
            if gone is None:
                break
            # Any hit that ends past the missing column, and before its window leaves it, needs it.
            count = gone
        return count

    def has_room(self, num_tokens: int, hit: Hit | None = None, *, spare_pages: int) -> bool:
        """Tell whether a new sequence of so many tokens could run now: wholly where all pages are kept.

        Units  spare_pages: pages that must stay free beside it, in the kinds that keep all pages
        """
        hit = hit or self._nothing
        total = ceil_div(num_tokens, self._page_tokens) + spare_pages
        for (kind, pool), columns in zip(self._kinds, hit.columns, strict=True):
            # Pages that a hit wakes up are counted as free as long as they are idle.
            idle = sum(1 for page in columns if page >= 0 and pool.is_idle(page))
            needed = total - hit.num_columns if kind.window_tokens is None else 1
            if pool.num_free - idle < needed:
                return False
        return True

    def open(self, hit: Hit | None = None, num_tokens: int = 0) -> SequencePages:
        """Return the holder of a sequence of so many tokens that starts to run, with the pages of a hit."""
        hit = hit or self._nothing
        pages = SequencePages(len(self._kinds))
        for i, ((kind, pool), columns) in enumerate(zip(self._kinds, hit.columns, strict=True)):
            first = kind.first_needed_column(hit.num_tokens)
            for page in columns[first:]:
                pool.hold(page)
                if kind.window_tokens is not None:
                    pool.keep(page)
            pages.columns[i] = list(columns)
            pages.first_held[i] = min(first, hit.num_columns)
        pages.capacity_tokens = hit.num_tokens
        pages.num_registered = hit.num_columns
        pages.free_position = self._next_free_position(pages)
        # The same prompt again, a longer one, and one that leaves where this one left an earlier one.
        size = self._page_tokens
        pages.likely_hits = ((num_tokens - 1) // size, num_tokens // size, hit.num_known_columns)
        return pages

    def held(self, pages: SequencePages) -> PageUpdates:
        """Return all columns of a sequence that hold a page, for a device that knows none of them."""
        return {
            kind.kind: [(c, page) for c, page in enumerate(columns) if page >= 0]
            for columns, (kind, _) in zip(pages.columns, self._kinds, strict=True)
        }

    def register(
        self, pages: SequencePages, keys: PageKeys, token_ids: list[int], num_tokens: int
    ) -> None:
        """Offer the pages that the first `num_tokens` tokens fill to later sequences.

        HAZARD: their KV is computed or will be by steps that are launched before any step planned later;
        a later step of the same stream runs after those, so it may read them.
        """
        first, end = pages.num_registered, num_tokens // self._page_tokens
        if not self.is_caching or end <= first:
            return
        names = keys.up_to(end, token_ids, self._page_tokens)
        for columns, held, (kind, pool) in zip(
            pages.columns, pages.first_held, self._kinds, strict=True
        ):
            for column in range(max(first, held), end):
                pool.register(columns[column], names[column])
            if kind.window_tokens is None:
                continue
            for hit in pages.likely_hits:
                needed = kind.first_needed_column(hit * self._page_tokens)
                for column in range(max(first, needed), min(hit, end)):
                    page = pool.find(names[column])
                    if page is not None:
                        pool.keep(page)
        pages.num_registered = end

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

        With the prefix cache on, what a hit at the end of the last full page would need is kept until the next
        page is full, so that a sequence that ends can be continued.
        HAZARD: steps already enqueued may still read them; a later step of the same stream may not run
        before those, so reuse is safe there and only there.
        """
        if self.is_caching:
            position -= position % self._page_tokens
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
        for i, (kind, pool) in enumerate(self._kinds):
            # The last columns are evicted first: without an earlier one, a later one is never found.
            held = pages.columns[i][pages.first_held[i] :][::-1]
            pool.free(held, keep=kind.window_tokens is not None)
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
        position = min(positions, default=_NEVER)
        if self.is_caching:
            position = ceil_div(position, self._page_tokens) * self._page_tokens
        return position
