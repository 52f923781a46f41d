"""The free pages of one layer kind. Knows neither sequences nor tensors."""

from __future__ import annotations


class PagePool:
    """Hands out page ids and takes each back exactly once.

    A prefix cache will hold pages too: it becomes one more holder here (a count per page in place of the
    flag), and `allocate` will ask it for pages that nobody else holds.
    """

    def __init__(self, kind: str, num_pages: int) -> None:
        self.kind = kind
        self.num_pages = num_pages
        # Last freed is first reused: it is the likeliest to be in the L2 cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_used = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages held by somebody."""
        return self.num_pages - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; the caller has made sure that they are there."""
        assert count <= len(self._free), f"{self.kind}: {count} pages of {len(self._free)} free"
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        for page in pages:
            self._is_used[page] = 1
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back; each was allocated and not freed since."""
        for page in pages:
            assert self._is_used[page], f"{self.kind}: page {page} is freed twice"
            self._is_used[page] = 0
        self._free.extend(pages)
