"""The frontend's view of the engine: submit requests, receive their events, know whether it lives.

Stands between the routes and `rose.protocol.channel`; knows tokens and events, no text and no HTTP. A request
whose reader goes away is aborted in the engine.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Protocol, Self

from rose.frontend.errors import RequestError
from rose.protocol.codec import ProtocolError
from rose.protocol.event import (
    EngineStatus,
    ErrorCode,
    ErrorEvent,
    FinishedEvent,
    FromEngine,
    TokensEvent,
)
from rose.protocol.request import Abort, Request, StatusQuery, ToEngine
from rose.utils.log import get_logger

RequestEvent = TokensEvent | FinishedEvent | ErrorEvent
QUERY_SECONDS = 1.0
"""How often the engine is asked for its state; its answer is the sign of life."""

logger = get_logger(__name__)


class Channel(Protocol):
    """What the client needs of `rose.protocol.channel.FrontendEndpoint`."""

    async def send(self, message: ToEngine) -> None:
        """Queue one message."""
        ...

    async def receive(self) -> list[FromEngine]:
        """Wait for the next events."""
        ...

    def close(self) -> None:
        """Close the channel."""
        ...


class EngineClient:
    """One engine behind a channel, for one event loop."""

    def __init__(self, channel: Channel, *, timeout_s: float = 60.0) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._queues: dict[str, asyncio.Queue[RequestEvent]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._death: str | None = None
        self._last_sign = time.monotonic()
        self.status: EngineStatus | None = None
        """The newest state the engine told; None before the first."""

    async def start(self) -> None:
        """Begin to listen and to watch."""
        self._last_sign = time.monotonic()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]

    async def close(self) -> None:
        """End every open request with an error and close the channel."""
        self.end_open()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._sending, return_exceptions=True)
        self._channel.close()

    @property
    def num_open(self) -> int:
        """Requests whose last event has not come."""
        return len(self._queues)

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now would be worked on."""
        return self.problem() is None and self.status is not None and self.status.is_ready

    def problem(self) -> str | None:
        """Tell what is wrong with the engine; None while it lives (it may still be loading)."""
        if self._death is not None:
            return self._death
        silence_s = time.monotonic() - self._last_sign
        if silence_s > self._timeout_s:
            return (
                f"the engine has said nothing for {silence_s:.0f} s (limit {self._timeout_s:g} s)"
            )
        return None

    def mark_dead(self, reason: str) -> None:
        """Take note that the engine's process has ended; open requests fail at once."""
        self._death = reason
        self.fail_open(reason)

    def require_ready(self) -> EngineStatus:
        """Return the engine's state.

        Raises  RequestError where it is dead, stuck or still loading.
        """
        problem = self.problem()
        if problem is not None:
            raise RequestError("engine_unavailable", f"no request can be answered: {problem}")
        if self.status is None or not self.status.is_ready:
            detail = self.status.detail if self.status else "starting"
            raise RequestError(
                "engine_loading",
                f"the engine is not ready yet ({detail or 'loading'}); try again, /ready tells when",
            )
        return self.status

    def submit(self, *requests: Request) -> Submission:
        """Send requests when the result is entered; their events come from it in the order they happen.

        Raises  RequestError where the engine cannot take requests.
        """
        self.require_ready()
        return Submission(self, requests)

    async def send(self, message: ToEngine) -> None:
        """Send one message; for this file and its tests."""
        await self._channel.send(message)

    def register(self, request_id: str, queue: asyncio.Queue[RequestEvent]) -> None:
        """Route the events of a request to a queue."""
        self._queues[request_id] = queue

    def forget(self, request_id: str) -> None:
        """Stop routing a request's events."""
        self._queues.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """Tell the engine to stop a request, without waiting: callers may be in the middle of a cancel."""
        self.forget(request_id)
        if self._death is None:
            task = asyncio.ensure_future(self._channel.send(Abort(request_id=request_id)))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _listen(self) -> None:
        while True:
            try:
                events = await self._channel.receive()
            except ProtocolError as error:
                # Whose event it was cannot be known, so nobody's answer can be trusted to be whole.
                logger.error("%s", error)
                self.fail_open(f"a message of the engine could not be read: {error}")
                continue
            self._last_sign = time.monotonic()
            for event in events:
                self._route(event)

    def _route(self, event: FromEngine) -> None:
        if isinstance(event, EngineStatus):
            self.status = event
            return
        queue = self._queues.get(event.request_id)
        if queue is None:
            return  # aborted: the engine had not yet read the abort
        if not isinstance(event, TokensEvent):
            self.forget(event.request_id)
        queue.put_nowait(event)

    async def _watch(self) -> None:
        while True:
            if self._death is None:
                await self._channel.send(StatusQuery())
            problem = self.problem()
            if problem is not None and self._queues:
                self.fail_open(problem)
            await asyncio.sleep(QUERY_SECONDS)

    def end_open(self) -> None:
        """End every open request because the server ends; its clients may ask again."""
        self.fail_open("the server is shutting down; send the request again", "shutting_down")

    def fail_open(self, reason: str, code: ErrorCode = "engine_failed") -> None:
        """End every open request with an error; the engine goes on until it is told."""
        for request_id, queue in list(self._queues.items()):
            self.forget(request_id)
            message = f"the answer was cut off: {reason}"
            queue.put_nowait(ErrorEvent(request_id=request_id, code=code, message=message))


class Submission:
    """The events of some requests; leaving the block aborts those that still run."""

    def __init__(self, client: EngineClient, requests: tuple[Request, ...]) -> None:
        self._client = client
        self._requests = requests
        self._queue: asyncio.Queue[RequestEvent] = asyncio.Queue()
        self._pending = {request.request_id for request in requests}

    async def __aenter__(self) -> Self:
        try:
            for request in self._requests:
                self._client.register(request.request_id, self._queue)
                await self._client.send(request)
        except BaseException:
            self._abort_pending()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._abort_pending()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestEvent:
        if not self._pending:
            raise StopAsyncIteration
        event = await self._queue.get()
        if not isinstance(event, TokensEvent):
            self._pending.discard(event.request_id)
        return event

    def abort(self, request_id: str) -> None:
        """Stop one request early; no further event of it matters."""
        if request_id in self._pending:
            self._pending.discard(request_id)
            self._client.abort(request_id)

    def _abort_pending(self) -> None:
        for request_id in list(self._pending):
            self.abort(request_id)
