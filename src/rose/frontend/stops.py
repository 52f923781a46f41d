"""Stop strings on a stream of text: nothing of a stop string is ever sent, nothing else is held back long.

Knows no tokens: the caller decides which text is searched (the content of an answer, never its reasoning).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Search one stream of text for several strings; the match that ends first wins."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.matched: str | None = None
        """The string that was found."""

    def push(self, text: str) -> str:
        """Take more text; return what can be sent. After a match everything else is dropped."""
        if not self._strings:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        place, self.matched = self._first_match(text)
        if self.matched is not None:
            self._held = ""
            return text[:place]
        keep = self._open_tail(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return what was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str | None]:
        # The match that ends first, as reading letter by letter would find it: so the cut into pieces,
        # which differs between a stream and a whole answer, cannot matter.
        found = [(place + len(s), place, s) for s in self._strings if (place := text.find(s)) >= 0]
        if not found:
            return 0, None
        _, place, string = min(found)
        return place, string

    def _open_tail(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(map(len, self._strings)) - 1)
        for length in range(longest, 0, -1):
            tail = text[-length:]
            if any(s.startswith(tail) for s in self._strings):
                return length
        return 0
