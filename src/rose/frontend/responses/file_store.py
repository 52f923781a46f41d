"""Responses in a file (SQLite), for several frontends and over restarts; see `store.Store`.

Calls take tens of microseconds: the file is written ahead and not flushed to the disk at each change, so a machine that
loses power may lose the last responses, a process that dies loses none. The file holds conversations as they are,
reasoning included; only its owner may read it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rose.frontend.responses.store import (
    Limits,
    Record,
    StoreError,
    decode_record,
    encode_record,
)
from rose.utils.errors import ConfigError

VERSION = 1
BUSY_SECONDS = 1.0
"""How long a call waits for another process that writes; writes take less than a millisecond."""
TABLES = """
CREATE TABLE records (
  id TEXT PRIMARY KEY, raw BLOB, raw_bytes INTEGER, event_bytes INTEGER, used REAL, beat REAL, wants_end INTEGER);
CREATE INDEX records_by_use ON records (used, raw_bytes, event_bytes);
CREATE INDEX records_to_end ON records (id) WHERE wants_end = 1;
CREATE TABLE events (id TEXT, number INTEGER, raw BLOB, PRIMARY KEY (id, number));
"""


class FileStore:
    """Records of all processes that open the same file."""

    is_shared = True

    def __init__(
        self, path: str, limits: Limits, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._file = _open(path)

    def put(self, record: Record) -> None:
        """Keep a record; the longest unused ones make room for it."""
        raw, now = encode_record(record), self._clock()
        with self._change() as change:
            change(
                "INSERT INTO records VALUES (?, ?, ?, 0, ?, ?, 0) ON CONFLICT (id) DO UPDATE SET "
                "raw = excluded.raw, raw_bytes = excluded.raw_bytes, used = excluded.used, beat = excluded.beat",
                (record.id, raw, len(raw), now, now),
            )
            self._make_room(change, now)

    def get(self, response_id: str) -> Record | None:
        """Return a record; it counts as used now."""
        now = self._clock()
        with self._change() as change:
            row = change(
                "UPDATE records SET used = ? WHERE id = ? AND used > ? RETURNING raw, beat",
                (now, response_id, now - self._limits.seconds),
            ).fetchone()
        if row is None:
            return None
        record = decode_record(row[0])
        record.touched = row[1]
        return record

    def delete(self, response_id: str) -> bool:
        """Forget a record and its events."""
        with self._change() as change:
            self._make_room(change, self._clock())
            found = change("DELETE FROM records WHERE id = ?", (response_id,)).rowcount
            change("DELETE FROM events WHERE id = ?", (response_id,))
        return found > 0

    def num_records(self) -> int:
        """Return how many are kept."""
        return self._sums()[0]

    def num_bytes(self) -> int:
        """Return how large they are together, events included."""
        return self._sums()[1]

    def add_events(self, response_id: str, first: int, events: Sequence[bytes]) -> None:
        """Keep the events from number `first` on, where those before them and the record are still kept."""
        rows = [(response_id, first + i, raw) for i, raw in enumerate(events)]
        num_bytes = sum(map(len, events))
        with self._change() as change:
            before = change(
                "SELECT 1 FROM events WHERE id = ? AND number = ?", (response_id, first - 1)
            )
            if first > 0 and before.fetchone() is None:
                return  # they made room for others; what is left would be read as if it were the first
            counted = change(
                "UPDATE records SET event_bytes = event_bytes + ? WHERE id = ?",
                (num_bytes, response_id),
            )
            if counted.rowcount:
                for row in rows:
                    change("INSERT OR REPLACE INTO events VALUES (?, ?, ?)", row)

    def events(self, response_id: str, first: int) -> list[bytes]:
        """Return the events from number `first` on."""
        with _told():
            rows = self._file.execute(
                "SELECT raw FROM events WHERE id = ? AND number >= ? ORDER BY number",
                (response_id, first),
            )
            return [raw for (raw,) in rows]

    def ask_to_end(self, response_id: str) -> None:
        """Ask whoever runs a response to cancel it."""
        with self._change() as change:
            change("UPDATE records SET wants_end = 1 WHERE id = ?", (response_id,))

    def beat(self, running: Collection[str]) -> set[str]:
        """Tell that these responses are being worked on; return those of them that shall end."""
        now = self._clock()
        with self._change() as change:
            for response_id in running:
                change("UPDATE records SET beat = ? WHERE id = ?", (now, response_id))
            rows = change("SELECT id FROM records WHERE wants_end = 1").fetchall()
            asked = {response_id for (response_id,) in rows}
            return asked & set(running)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _sums(self) -> tuple[int, int]:
        with _told():
            row = self._file.execute(
                "SELECT count(*), total(raw_bytes + event_bytes) FROM records WHERE used > ?",
                (self._clock() - self._limits.seconds,),
            ).fetchone()
        return row[0], int(row[1])

    def _make_room(self, change: Callable[..., sqlite3.Cursor], now: float) -> None:
        limits = self._limits
        gone = change("SELECT id FROM records WHERE used <= ?", (now - limits.seconds,)).fetchall()
        count, total = change(
            "SELECT count(*), total(raw_bytes + event_bytes) FROM records WHERE used > ?",
            (now - limits.seconds,),
        ).fetchone()
        if count > limits.num_records or total > limits.num_bytes:
            oldest = change(
                "SELECT id, raw_bytes + event_bytes FROM records WHERE used > ? ORDER BY used, rowid",
                (now - limits.seconds,),
            )
            for response_id, num_bytes in oldest.fetchall():
                if count <= limits.num_records and total <= limits.num_bytes:
                    break
                gone.append((response_id,))
                count, total = count - 1, total - num_bytes
        for row in gone:
            change("DELETE FROM records WHERE id = ?", row)
            change("DELETE FROM events WHERE id = ?", row)

    @contextmanager
    def _change(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """Change several rows at once or not at all.

        Raises  StoreError where the file cannot be written
        """
        with _told():
            self._file.execute("BEGIN IMMEDIATE")
            try:
                yield self._file.execute
            except BaseException:
                self._file.execute("ROLLBACK")
                raise
            self._file.execute("COMMIT")


@contextmanager
def _told() -> Iterator[None]:
    """Say what SQLite says as a StoreError."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"the file of responses cannot be used: {error}") from error


def _open(path: str) -> sqlite3.Connection:
    """Open or make a file.

    Raises  ConfigError where that cannot be
    """
    try:
        Path(path).touch(mode=0o600)
        file = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = NORMAL")
        file.execute("BEGIN IMMEDIATE")
        version = file.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            for statement in filter(str.strip, TABLES.split(";")):
                file.execute(statement)
            file.execute(f"PRAGMA user_version = {VERSION}")
        file.execute("COMMIT")
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"response_store={path!r} cannot be opened: {error}; allowed: memory, none, or a file that this server "
            "made or may make; change --response-store"
        ) from error
    if version not in (0, VERSION):
        raise ConfigError(
            f"response_store={path!r} was written by another version of rose (layout {version}); allowed: layout "
            f"{VERSION}; name another file"
        )
    return file
