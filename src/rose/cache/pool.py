"""The pages of one layer kind: who holds them, and what those that nobody holds still remember.

A page is free (its content is nothing), held (by one or more sequences), or idle: held by nobody, but its
tokens have a key under which a later sequence finds it. `allocate` takes free pages first, then idle ones, the
least recently held first. Knows neither sequences nor tensors.
"""

from __future__ import annotations

from collections import OrderedDict


class PagePool:
    """Hands out page ids and takes each holder's page back exactly once."""

    def __init__(self, kind: str, num_pages: int) -> None:
        self.kind = kind
        self.num_pages = num_pages
        self.num_evictions = 0
        """Idle pages given away, so that their content is lost."""
        # Last freed is first reused: it is the likeliest to be in the L2 cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._pages: dict[bytes, int] = {}
        self._is_kept = bytearray(num_pages)
        # In the order of eviction: pages in the middle of somebody's prompt, then those where a hit is likely to end.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give."""
        return len(self._free) + len(self._idle) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Pages held by somebody."""
        return self.num_pages - self.num_free

    @property
    def num_idle(self) -> int:
        """Pages that nobody holds and a key still finds."""
        return len(self._idle) + len(self._kept)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages that nobody holds; the caller has made sure that they are there."""
        assert count <= self.num_free, f"{self.kind}: {count} pages of {self.num_free} free"
        if count == 0:
            return []
        while len(self._free) < count:
            self._evict()
        pages = self._free[-count:]
        del self._free[-count:]
        for page in pages:
            self._holders[page] = 1
        return pages

    def find(self, key: bytes) -> int | None:
        """Return the page that holds what the key stands for."""
        return self._pages.get(key)

    def find_all(self, keys: list[bytes]) -> list[int]:
        """Return the pages of keys that `find` knows."""
        return [self._pages[key] for key in keys]

    def is_idle(self, page: int) -> bool:
        """Whether nobody holds the page: `hold` would take it from those that `allocate` can give."""
        return not self._holders[page]

    def hold(self, page: int) -> None:
        """Add a holder to a page that `find` returned; its content may not be written from now on."""
        if not self._holders[page]:
            del (self._kept if self._is_kept[page] else self._idle)[page]
        self._holders[page] += 1

    def register(self, page: int, key: bytes) -> None:
        """Let `find` return a held page whose content will never change; another page of that key stays."""
        assert self._holders[page], f"{self.kind}: page {page} is registered and nobody holds it"
        if key not in self._pages and self._keys[page] is None:
            self._pages[key], self._keys[page] = page, key

    def keep(self, page: int) -> None:
        """Evict a page that `find` returned only after all that are not kept."""
        if self._is_kept[page]:
            return
        self._is_kept[page] = 1
        if not self._holders[page]:
            del self._idle[page]
            self._kept[page] = None

    def free(self, pages: list[int], *, keep: bool = False) -> None:
        """Give pages back, each held by the caller once; the first are evicted first.

        Units  keep: as `keep` for each of them
        """
        for page in pages:
            holders = self._holders[page]
            assert holders, f"{self.kind}: page {page} is freed twice"
            self._holders[page] = holders - 1
            if self._keys[page] is None:
                self._free.append(page)
                continue
            if keep:
                self._is_kept[page] = 1
            if holders == 1:
                (self._kept if self._is_kept[page] else self._idle)[page] = None

    def _evict(self) -> None:
        page, _ = (self._idle or self._kept).popitem(last=False)
        key = self._keys[page]
        assert key is not None, f"{self.kind}: page {page} is idle without a key"
        del self._pages[key]
        self._keys[page] = None
        self._is_kept[page] = 0
        self._free.append(page)
        self.num_evictions += 1
