"""Server-sent events as bytes, and what makes them of the pieces of an answer.

A stream sends the same bytes around every token's text. They are cut out of an encoded example, so that a filled
template is what encoding would have given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from rose.frontend.formatters.base import Delta, DeltaKind
from rose.frontend.generation import Piece
from rose.frontend.schemas import encode

DONE = b"data: [DONE]\n\n"
HOLE = "\x00hole\x00"
"""Stands in an example for the text to come."""


def sse_event(data: bytes) -> bytes:
    """Return JSON as an event; JSON holds no raw line break, so one data line is right."""
    return b"data: " + data + b"\n\n"


def sse_lines(chunks: Iterable[Any]) -> bytes:
    """Return chunks as events."""
    return b"".join([sse_event(encode(chunk)) for chunk in chunks])


class ChunkWriter(ABC):
    """Makes chunks of pieces and events of chunks."""

    def __init__(self) -> None:
        self._templates: dict[tuple[int, DeltaKind, int], list[bytes]] = {}

    @abstractmethod
    def chunks(self, piece: Piece) -> list[Any]:
        """Return the chunks of one piece."""

    @abstractmethod
    def usage_chunk(self) -> Any:
        """Return the chunk after the last choice."""

    def lines(self, piece: Piece) -> bytes:
        """Return the chunks of one piece as events."""
        return sse_lines(self.chunks(piece))

    def template(self, index: int, kind: DeltaKind, place: int) -> list[bytes]:
        """Return the events of pieces of one delta that is text only, cut where the text goes.

        `encode(text).join` of it makes those of a text. The choice `index` must have begun.
        """
        key = (index, kind, place)
        parts = self._templates.get(key)
        if parts is None:
            example = Piece(index=index, deltas=[Delta(kind=kind, index=place, text=HOLE)])
            parts = self._templates[key] = self.lines(example).split(encode(HOLE))
        return parts
