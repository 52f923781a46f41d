"""Responses that run for nobody in particular: they go on when their client leaves, and can be followed again.

The events of each are kept as they were sent, so that a stream can be resumed at any of them, as long as the limits
allow. In a shared store every process can follow and end what another runs. Knows turns and bytes, no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing

from rose.frontend.errors import RequestError
from rose.frontend.metrics import Metrics
from rose.frontend.middleware import log_failure
from rose.frontend.responses.events import Event, sse
from rose.frontend.responses.store import Limits, Record, Store, StoreError
from rose.frontend.responses.turn import Turn
from rose.frontend.responses.writer import FINISHED
from rose.utils.log import get_logger

BEAT_SECONDS = 1.0
"""How often a process tells a shared store that its responses still run, and asks what shall end."""
POLL_SECONDS = 0.1
"""How often a process looks for events of a response that another one runs."""
LOST_SECONDS = 30.0
"""A response whose process has told nothing for so long runs no more."""

logger = get_logger(__name__)


class EventLog:
    """The events of one response; readers wait for more until it is closed."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_closed = False
        self.ended: float | None = None
        """When it was closed, by the monotonic clock."""
        self._events: list[bytes] = []
        self._news = asyncio.Event()

    def add(self, events: list[bytes]) -> None:
        """Keep more events."""
        self._events += events
        self.num_bytes += sum(map(len, events))
        self._wake()

    @property
    def num_events(self) -> int:
        """How many there are."""
        return len(self._events)

    def close(self) -> None:
        """Say that no more will come."""
        self.is_closed = True
        self.ended = time.monotonic()
        self._wake()

    async def read(self, first: int) -> AsyncGenerator[bytes, None]:
        """Yield the events from number `first` on, those to come included."""
        while True:
            news = self._news
            if first < len(self._events):
                ready = self._events[first:]
                first += len(ready)
                yield b"".join(ready)
            elif self.is_closed:
                return
            else:
                await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Background:
    """The responses that run in the background of one process, and the events of those that ran."""

    def __init__(
        self,
        store: Store,
        limits: Limits,
        metrics: Metrics,
        *,
        hides: bool = False,
    ) -> None:
        """`hides`: this server hides reasoning, also in events that were kept when it was shown."""
        self._store = store
        self._limits = limits
        self._metrics = metrics
        self._hides = hides
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turns: dict[str, Turn] = {}
        self._logs: OrderedDict[str, EventLog] = OrderedDict()
        self._beat: asyncio.Task[None] | None = None

    def start(self, turn: Turn, *, timeout_s: float | None = None) -> EventLog:
        """Run a turn, so long at most; return its events, of which the first are there already."""
        response_id = turn.body.id
        log = self._logs[response_id] = EventLog()
        self._make_room()
        self._turns[response_id] = turn
        turn.keep()
        self._add(turn, log, turn.created())
        task = self._tasks[response_id] = asyncio.create_task(self._run(turn, log, timeout_s))
        task.add_done_callback(lambda _: self._forget(response_id))
        if self._store.is_shared and (self._beat is None or self._beat.done()):
            self._beat = asyncio.create_task(self._keep_beating())
        return log

    def events(self, record: Record, first: int) -> AsyncGenerator[bytes, None] | None:
        """Return the events of a response from number `first` on, None where they are not kept (any more)."""
        log = self._logs.get(record.id)
        if log is not None:
            return log.read(first)
        is_open = record.is_hidden or not self._hides
        if record.is_background and is_open and self._store.events(record.id, 0):
            return self._follow(record.id, first)
        return None

    def num_running(self) -> int:
        """Return how many run here."""
        return len(self._tasks)

    def running(self, response_id: str) -> Turn | None:
        """Return the turn of a response that runs here."""
        return self._turns.get(response_id)

    async def cancel(self, record: Record) -> None:
        """End a response and wait until it has ended; one that has is left alone."""
        # Taken now: a DELETE may forget them while this waits.
        task, turn = self._tasks.get(record.id), self._turns.get(record.id)
        log = self._logs.get(record.id)
        if task is not None and turn is not None:
            task.cancel()
            await asyncio.wait([task])
            if turn.body.status not in FINISHED:  # it had not even begun to run
                turn.cancelled()
                if log is not None:
                    log.close()
        elif record.status not in FINISHED:
            self._store.ask_to_end(record.id)
            await self._until_ended(record.id)

    def forget(self, response_id: str) -> None:
        """Drop the events of a response."""
        self._logs.pop(response_id, None)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the ends of what runs."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=timeout_s)

    async def _run(self, turn: Turn, log: EventLog, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s), aclosing(turn.events()) as source:
                async for events in source:
                    self._add(turn, log, events)
        except asyncio.CancelledError:
            turn.cancelled()
            self._metrics.answered(turn.job.endpoint, 499)
        except RequestError as error:
            self._fail(turn, log, error)
        except TimeoutError:
            text = f"the response was not done within {timeout_s:g} s, the limit of this request"
            self._fail(turn, log, RequestError("request_timeout", text))
        except Exception as bug:  # noqa: BLE001
            log_failure(bug)
            text = "the server failed while it made this response"
            self._fail(turn, log, RequestError("internal_error", text))
        finally:
            log.close()

    def _fail(self, turn: Turn, log: EventLog, error: RequestError) -> None:
        self._metrics.answered(turn.job.endpoint, error.kind.status, "error")
        self._add(turn, log, turn.failed(error))

    def _add(self, turn: Turn, log: EventLog, events: list[Event]) -> None:
        raw = [sse(event) for event in events]
        try:
            self._store.add_events(turn.body.id, log.num_events, raw)
        except StoreError as error:
            logger.error("events of %s are not kept: %s", turn.body.id, error)
        log.add(raw)

    def _forget(self, response_id: str) -> None:
        self._tasks.pop(response_id, None)
        self._turns.pop(response_id, None)
        self._make_room()

    def _make_room(self) -> None:
        """Drop the oldest events of finished responses beyond the limits."""
        num_bytes = sum(log.num_bytes for log in self._logs.values())
        oldest = time.monotonic() - self._limits.seconds
        for response_id, log in list(self._logs.items()):
            is_over = (
                len(self._logs) > self._limits.num_records or num_bytes > self._limits.num_bytes
            )
            if log.ended is not None and (is_over or log.ended < oldest):
                del self._logs[response_id]
                num_bytes -= log.num_bytes

    # ---- what other processes run ---------------------------------------------------------------------------

    async def _keep_beating(self) -> None:
        while self._tasks:
            try:
                for response_id in self._store.beat(list(self._tasks)):
                    self._tasks[response_id].cancel()
            except StoreError as error:
                logger.error("%s", error)
            await asyncio.sleep(BEAT_SECONDS)

    async def _follow(self, response_id: str, first: int) -> AsyncGenerator[bytes, None]:
        while True:
            # In this order: what was written before the end is read after it was seen.
            record = self._store.get(response_id)
            events = self._store.events(response_id, first)
            first += len(events)
            if events:
                yield b"".join(events)
            if record is None or record.status in FINISHED or is_lost(record):
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _until_ended(self, response_id: str) -> None:
        while True:
            record = self._store.get(response_id)
            if record is None or record.status in FINISHED or is_lost(record):
                return
            await asyncio.sleep(POLL_SECONDS)


def is_lost(record: Record) -> bool:
    """Return whether the process that ran a response of a shared store is gone; other stores go with their process."""
    is_old = record.touched > 0 and time.time() - record.touched > LOST_SECONDS
    return is_old and record.status not in FINISHED
