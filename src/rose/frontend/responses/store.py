"""Finished and running responses, kept for a while: in memory here, in a file in `file_store.py`.

A record holds its whole conversation, so that one response can be deleted or forgotten and those after it can still
go on. What a store may keep is limited in number, bytes and time; the longest unused go first. Knows no HTTP.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec
from msgspec import Struct

from rose.frontend.config import FrontendConfig
from rose.frontend.responses.items import Item
from rose.utils.errors import RoseError


class Record(Struct, kw_only=True):
    """One response and what a next turn needs of it."""

    id: str
    status: str
    body: msgspec.Raw
    """The JSON that clients get."""
    history: list[Item]
    """The conversation before the answer, instructions left out."""
    output: list[Item]
    """The answer with its reasoning, whether clients may see it or not."""
    sampled: dict[int, list[int]]
    """Tokens of some items of history and output together, by place; see `formatters.harmony.sampled`."""
    owner: str = ""
    """Name of the key that it was made with; others do not find it."""
    is_background: bool = False
    is_hidden: bool = False
    """Its reasoning was not shown."""
    touched: float = 0.0
    """Last sign of life of the process in which it runs, in seconds since 1970; 0 where the store is not shared."""


class Limits(Struct, frozen=True, kw_only=True):
    """What a store may keep."""

    num_records: int
    num_bytes: int
    seconds: float
    """Unused for so long, a record is forgotten."""


class StoreError(RoseError):
    """A store that cannot keep anything now, such as a file on a full disk."""


class Store(Protocol):
    """Where records are kept. Implementations never wait long: they are called on the event loop.

    In a shared store other processes see records too, and the events of responses made in the background; in the
    others these methods do nothing.
    """

    is_shared: bool

    def put(self, record: Record) -> None:
        """Keep a record, in the place of the one with the same id.

        Raises  StoreError
        """
        ...

    def get(self, response_id: str) -> Record | None:
        """Return a record, None where there is none (any more)."""
        ...

    def delete(self, response_id: str) -> bool:
        """Forget a record; return whether there was one."""
        ...

    def num_records(self) -> int:
        """Return how many are kept."""
        ...

    def num_bytes(self) -> int:
        """Return how large they are together."""
        ...

    def add_events(self, response_id: str, first: int, events: Sequence[bytes]) -> None:
        """Keep the events of a response from number `first` on."""
        ...

    def events(self, response_id: str, first: int) -> list[bytes]:
        """Return the events of a response from number `first` on."""
        ...

    def ask_to_end(self, response_id: str) -> None:
        """Ask the process that runs a response to cancel it."""
        ...

    def beat(self, running: Collection[str]) -> set[str]:
        """Tell that these responses are being worked on; return those of them that shall end."""
        ...

    def close(self) -> None:
        """Close what is open."""
        ...


class _OwnStore:
    """What a store of one process has no use for."""

    is_shared = False

    def add_events(self, response_id: str, first: int, events: Sequence[bytes]) -> None:
        """Do nothing: the process has them."""

    def events(self, response_id: str, first: int) -> list[bytes]:
        """Return nothing."""
        return []

    def ask_to_end(self, response_id: str) -> None:
        """Do nothing: whoever asks is the one that runs it."""

    def beat(self, running: Collection[str]) -> set[str]:
        """Return nothing: nobody else could ask."""
        return set()

    def close(self) -> None:
        """Do nothing: memory goes with the process."""


class MemoryStore(_OwnStore):
    """Records of one process, as bytes, so that their size is known and nobody changes them by accident."""

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._records: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._num_bytes = 0

    def put(self, record: Record) -> None:
        """Keep a record; the longest unused ones make room for it."""
        raw = encode_record(record)
        self.delete(record.id)
        self._records[record.id] = (self._clock() + self._limits.seconds, raw)
        self._num_bytes += len(raw)
        self._make_room()

    def get(self, response_id: str) -> Record | None:
        """Return a record; it counts as used now."""
        self._forget_expired()
        found = self._records.get(response_id)
        if found is None:
            return None
        self._records[response_id] = (self._clock() + self._limits.seconds, found[1])
        self._records.move_to_end(response_id)
        return decode_record(found[1])

    def delete(self, response_id: str) -> bool:
        """Forget a record."""
        self._forget_expired()
        found = self._records.pop(response_id, None)
        if found is None:
            return False
        self._num_bytes -= len(found[1])
        return True

    def num_records(self) -> int:
        """Return how many are kept."""
        self._forget_expired()
        return len(self._records)

    def num_bytes(self) -> int:
        """Return their size together."""
        self._forget_expired()
        return self._num_bytes

    def _forget_expired(self) -> None:
        # The first was used longest ago, so it is the first to expire.
        while self._records and next(iter(self._records.values()))[0] <= self._clock():
            self._drop_first()

    def _make_room(self) -> None:
        limits = self._limits
        while self._records and (
            len(self._records) > limits.num_records or self._num_bytes > limits.num_bytes
        ):
            self._drop_first()

    def _drop_first(self) -> None:
        _, (_, raw) = self._records.popitem(last=False)
        self._num_bytes -= len(raw)


class NoStore(_OwnStore):
    """Keeps nothing."""

    def put(self, record: Record) -> None:
        """Do nothing."""

    def get(self, response_id: str) -> Record | None:
        """Return nothing."""
        return None

    def delete(self, response_id: str) -> bool:
        """Return that there was nothing."""
        return False

    def num_records(self) -> int:
        """Return 0."""
        return 0

    def num_bytes(self) -> int:
        """Return 0."""
        return 0


_DECODER = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """Return a record as bytes."""
    return msgspec.json.encode(record)


def decode_record(raw: bytes) -> Record:
    """Return a record from bytes that `encode_record` made."""
    return _DECODER.decode(raw)


def owned(record: Record | None, owner: str) -> Record | None:
    """Return a record to its owner, and nothing to anybody else."""
    return record if record is not None and record.owner == owner else None


def as_failed(record: Record, message: str) -> Record:
    """Return a record of a response that nobody will finish."""
    body = msgspec.json.decode(record.body)
    body |= {"status": "failed", "error": {"code": "server_error", "message": message}}
    raw = msgspec.Raw(msgspec.json.encode(body))
    return msgspec.structs.replace(record, status="failed", body=raw)


def limits_of(config: FrontendConfig) -> Limits:
    """Return what the configuration lets a store keep."""
    return Limits(
        num_records=config.response_store_count,
        num_bytes=config.response_store_bytes,
        seconds=config.response_store_s,
    )
