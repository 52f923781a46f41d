"""Responses that run for nobody in particular: they go on when their client leaves, and can be followed again.

The events of each are kept as they were sent, so that a stream can be resumed at any of them, as long as the limits
allow. Knows turns and bytes, no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing

from rose.frontend.errors import RequestError
from rose.frontend.middleware import log_failure
from rose.frontend.responses.events import Event, sse
from rose.frontend.responses.store import Limits
from rose.frontend.responses.turn import Turn
from rose.frontend.responses.writer import FINISHED


class EventLog:
    """The events of one response; readers wait for more until it is closed."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_closed = False
        self.ended: float | None = None
        """When it was closed, by the monotonic clock."""
        self._events: list[bytes] = []
        self._news = asyncio.Event()

    def add(self, events: list[Event]) -> None:
        """Keep more events."""
        for event in events:
            raw = sse(event)
            self._events.append(raw)
            self.num_bytes += len(raw)
        self._wake()

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

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turns: dict[str, Turn] = {}
        self._logs: OrderedDict[str, EventLog] = OrderedDict()

    def start(self, turn: Turn) -> EventLog:
        """Run a turn; return its events, of which the first are there already."""
        response_id = turn.body.id
        log = self._logs[response_id] = EventLog()
        self._make_room()
        self._turns[response_id] = turn
        turn.keep()
        log.add(turn.begin())
        task = self._tasks[response_id] = asyncio.create_task(self._run(turn, log))
        task.add_done_callback(lambda _: self._forget(response_id))
        return log

    def log(self, response_id: str) -> EventLog | None:
        """Return the events of a response, None where they are not kept (any more)."""
        return self._logs.get(response_id)

    def running(self, response_id: str) -> Turn | None:
        """Return the turn of a response that runs here."""
        return self._turns.get(response_id)

    async def cancel(self, response_id: str) -> None:
        """Stop a response that runs here, and wait until it has."""
        task, turn = self._tasks.get(response_id), self._turns.get(response_id)
        if task is None or turn is None:
            return
        task.cancel()
        await asyncio.wait([task])
        if turn.body.status not in FINISHED:  # it had not even begun to run
            turn.cancelled()
            self._logs[response_id].close()

    def forget(self, response_id: str) -> None:
        """Drop the events of a response."""
        self._logs.pop(response_id, None)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the ends of what runs."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=timeout_s)

    async def _run(self, turn: Turn, log: EventLog) -> None:
        try:
            async with aclosing(turn.events()) as source:
                async for events in source:
                    log.add(events)
        except asyncio.CancelledError:
            turn.cancelled()
        except RequestError as error:
            log.add(turn.failed(error))
        except Exception as bug:  # noqa: BLE001
            log_failure(bug)
            error = RequestError("internal_error", "the server failed while it made this response")
            log.add(turn.failed(error))
        finally:
            log.close()

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
