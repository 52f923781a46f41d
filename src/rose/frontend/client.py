"""The frontend's view of the engine: submit requests, receive their events, know whether it lives.

Stands between the routes and `rose.protocol.channel`; knows tokens and events, no text and no HTTP. A request
whose reader goes away is aborted in the engine. When the engine is lost, requests that it had begun end with an
error; the others wait a little for its successor and are sent once more.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
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
from rose.protocol.grammar import Vocabulary
from rose.protocol.request import Abort, Request, StatusQuery, ToEngine
from rose.utils.log import get_logger

RequestEvent = TokensEvent | FinishedEvent | ErrorEvent
Waiting = deque[RequestEvent | bytes | Exception]
"""What has come and was not read, in order."""
Shortcut = Callable[[Waiting], None]
"""Takes tokens on the spot, without a turn of the event loop for whoever waits for them. Leaves what the reader must
see: events untouched, before them bytes that could not be sent at once or what went wrong; never raises."""
QUERY_SECONDS = 1.0
"""How often the engine is asked for its state."""
WATCH_SECONDS = 0.1
"""How often it is looked whether the engine has said anything."""
BOUNDS_OF_A_HANG = 5
"""A step that takes so many times what was predicted does not end any more."""
AGAIN_SECONDS = 4.5
"""After the last sign of a lost engine: how long requests that it had not begun wait for its successor, so that
nobody waits more than 5 s for an answer or an error."""
NOT_BEGUN: ErrorCode = "engine_unavailable"

logger = get_logger(__name__)


class Channel(Protocol):
    """What the client needs of `rose.protocol.channel.FrontendEndpoint`."""

    async def send(self, message: ToEngine) -> None:
        """Queue one message."""
        ...

    async def receive(self) -> list[FromEngine]:
        """Wait for events; return those that are there, up to a bound. Lets others run, also when it need not wait."""
        ...

    def close(self) -> None:
        """Deliver what was sent and close the channel."""
        ...

    def drop(self) -> None:
        """Close the channel of an engine that is gone."""
        ...


class EngineClient:
    """One engine, or one after the other, behind a channel, for one event loop."""

    def __init__(
        self,
        channel: Channel | None = None,
        *,
        timeout_s: float = 4.0,
        is_supervised: bool = False,
    ) -> None:
        self._first_channel = channel
        self._channel: Channel | None = None
        self._timeout_s = timeout_s
        self._is_supervised = is_supervised
        self._open: dict[str, Submission] = {}
        self._due: list[Submission] = []
        """Those for which events have come that nobody was told of yet."""
        self._held: set[Submission] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._death: str | None = None
        self._loss = "it was stopping"
        """Why the last engine was lost; what it says itself comes before anybody tells why."""
        self._last_sign = time.monotonic()
        self.silence_s = 0.0
        """Since the engine's last sign, as far as this process itself ran."""
        self._has_been_ready = False
        self.is_draining = False
        """Whether the server ends: what runs goes on, nothing else is taken."""
        self.num_engines = 0
        """Engines there have been, this one included."""
        self.num_sent_again = 0
        """Requests that the next engine got because the one before had not begun them."""
        self._vocabulary: Vocabulary | None = None
        self.status: EngineStatus | None = None
        """The newest state the engine told; None before the first."""

    def bring(self, vocabulary: Vocabulary) -> None:
        """Have every engine told of the vocabulary that requests' grammars are written for, once it is ready."""
        self._vocabulary = vocabulary

    async def start(self) -> None:
        """Begin to listen and to watch."""
        if self._first_channel is not None:
            self.attach(self._first_channel)
        self._watcher = asyncio.create_task(self._watch())

    def attach(self, channel: Channel) -> None:
        """Listen to an engine that was just started; once it is ready it gets what its predecessor had not begun."""
        assert self._channel is None or self._death is not None, "it is told first why one is gone"
        self._detach()
        self._channel = channel
        self.status, self._death, self._has_been_ready = None, None, False
        self._note_sign()
        self.num_engines += 1
        self._listener = asyncio.create_task(self._listen(channel))

    def _detach(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None
        if self._channel is not None:
            self._channel.drop()
            self._channel = None

    async def close(self) -> None:
        """End every open request with an error and close the channel."""
        self.end_open()
        tasks = [task for task in (self._watcher, self._listener) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._sending, return_exceptions=True)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    @property
    def num_open(self) -> int:
        """Requests whose last event has not come."""
        return len(self._open)

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now would be worked on."""
        return (
            not self.is_draining
            and self.problem() is None
            and self.status is not None
            and self.status.is_ready
        )

    @property
    def has_been_ready(self) -> bool:
        """Whether this engine has taken requests."""
        return self._has_been_ready

    def problem(self) -> str | None:
        """Tell what is wrong with the engine; None while it lives (it may still be loading for the first time)."""
        if self._death is not None:
            return self._death
        if self.num_engines > 1 and not self._has_been_ready:
            detail = self.status.detail if self.status else ""
            return f"the engine was lost and is being started again ({detail or 'starting'})"
        return self.hang()

    def hang(self) -> str | None:
        """Tell that the engine is stuck in a step; None while it makes progress or is not ready yet."""
        status = self.status
        if status is None or not status.is_ready:
            return None
        limit_s = max(self._timeout_s, BOUNDS_OF_A_HANG * status.step_bound_s)
        if self.silence_s <= limit_s:
            return None
        return (
            f"the engine has made no progress for {self.silence_s:.1f} s; allowed: {limit_s:g} s where a step of "
            f"{status.step_bound_s:.3f} s is expected; --engine-timeout allows more"
        )

    def mark_dead(self, reason: str) -> None:
        """Take note that the engine is lost; requests that it had begun fail at once."""
        self._death = self._loss = reason
        for submission in set(self._open.values()):
            if not self._hold(submission):
                submission.lose(reason)

    def require_ready(self) -> EngineStatus:
        """Return the engine's state.

        Raises  RequestError where it is dead, stuck or still loading, or where the server ends.
        """
        if self.is_draining:
            raise RequestError(
                "shutting_down",
                "this server is shutting down: it finishes what runs and takes no new requests; send the request "
                "to another server, or here again once it is back",
            )
        problem = self.problem()
        if problem is not None:
            raise RequestError(NOT_BEGUN, f"no request can be answered: {problem}; try again later")
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

    async def send(self, submission: Submission) -> None:
        """Send the requests of a submission and route their events to it; for this file."""
        assert self._channel is not None, "an engine was ready"
        channel = self._channel
        for request in submission.requests:
            holder = self._open.setdefault(request.request_id, submission)
            # Another's tokens must never be routed to this one.
            assert holder is submission, f"request_id {request.request_id!r} is open already"
            missing = self._missing_vocabulary(request)
            if missing is not None:
                await channel.send(missing)
            await channel.send(request)

    def _missing_vocabulary(self, request: Request) -> Vocabulary | None:
        """Return the vocabulary that a request needs, unless the engine has said that it knows it."""
        known = self.status.vocabularies if self.status is not None else []
        is_needed = request.constraint is not None and request.constraint.vocabulary not in known
        return self._vocabulary if is_needed else None

    def forget(self, request_id: str) -> None:
        """Stop routing a request's events."""
        self._open.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """Tell the engine to stop a request, without waiting: callers may be in the middle of a cancel."""
        submission = self._open.pop(request_id, None)
        if submission is not None and submission not in self._held and self._death is None:
            self._send_soon(Abort(request_id=request_id))

    def _send_soon(self, message: ToEngine) -> None:
        if self._channel is not None:
            task = asyncio.ensure_future(self._channel.send(message))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _listen(self, channel: Channel) -> None:
        while True:
            try:
                events = await channel.receive()
            except ProtocolError as error:
                # Whose event it was cannot be known, so nobody's answer can be trusted to be whole.
                logger.error("%s", error)
                self.fail_open(f"a message of the engine could not be read: {error}")
                continue
            self._note_sign()
            self._sort(events)

    def _sort(self, events: list[FromEngine]) -> None:
        """Give each submission its events, and only then tell it: several of one are sent on together."""
        find, due = self._open.get, self._due
        for event in events:
            # Tokens first and by hand: everything else is rare.
            if isinstance(event, TokensEvent):
                submission = find(event.request_id)
                if submission is not None:  # else aborted: the engine had not yet read the abort
                    waiting = submission.waiting
                    if not waiting:
                        due.append(submission)
                    waiting.append(event)
            else:
                self._route(event)
        self._due = []
        for submission in due:
            submission.deliver()

    def _note_sign(self) -> None:
        self._last_sign, self.silence_s = time.monotonic(), 0.0

    def _route(self, event: EngineStatus | FinishedEvent | ErrorEvent) -> None:
        if isinstance(event, EngineStatus):
            self.status = event
            if event.is_ready and not self._has_been_ready:
                self._has_been_ready = True
                if self._vocabulary is not None and self._vocabulary.key not in event.vocabularies:
                    self._send_soon(self._vocabulary)
                self._send_held()
            return
        submission = self._open.get(event.request_id)
        if submission is None:
            return
        if isinstance(event, ErrorEvent) and event.code == NOT_BEGUN and self._hold(submission):
            return
        self.forget(event.request_id)
        if not submission.waiting:
            self._due.append(submission)
        submission.put_last(event)

    async def _watch(self) -> None:
        asked, looked = 0.0, time.monotonic()
        while True:
            now = time.monotonic()
            # Time in which this process itself did not run is nobody's silence.
            self.silence_s += min(now - looked, 2 * WATCH_SECONDS)
            looked = now
            if now - asked >= QUERY_SECONDS and self._death is None:
                asked = now
                self._send_soon(StatusQuery())
            problem = self.hang()
            if problem is not None and not self._is_supervised and self._open:
                self.fail_open(problem)
            await asyncio.sleep(WATCH_SECONDS)

    def _hold(self, submission: Submission) -> bool:
        """Keep requests that a lost engine had not begun for the next; False where that is not to be."""
        if submission in self._held:
            return True
        if (
            not self._is_supervised
            or self.is_draining
            or submission.has_begun
            or submission.is_again
        ):
            return False
        left_s = self._last_sign + AGAIN_SECONDS - time.monotonic()
        if left_s <= 0:
            return False
        submission.is_again = True
        self._held.add(submission)
        asyncio.get_running_loop().call_later(left_s, self._give_up, submission)
        return True

    def _give_up(self, submission: Submission) -> None:
        if submission in self._held:
            self._held.discard(submission)
            submission.lose(self._loss)

    def _send_held(self) -> None:
        held, self._held = self._held, set()
        for submission in held:
            self.num_sent_again += len(submission.pending)
            for request_id in submission.pending:
                # Requests are sent in one turn of the loop each, so their order does not matter here.
                self._send_soon(submission.request(request_id))

    def drain(self) -> None:
        """Take no more requests; what runs goes on."""
        self.is_draining = True

    def end_open(self) -> None:
        """End every open request because the server ends; its clients may ask again."""
        self.fail_open("the server is shutting down; send the request again", "shutting_down")

    def fail_open(self, reason: str, code: ErrorCode = "engine_failed") -> None:
        """End every open request with an error; the engine goes on until it is told."""
        for submission in set(self._open.values()):
            submission.fail(f"the answer was cut off: {reason}", code)


class Submission:
    """The events of some requests; leaving the block aborts those that still run."""

    def __init__(self, client: EngineClient, requests: tuple[Request, ...]) -> None:
        self._client = client
        self.waiting: Waiting = deque()
        self._reader: asyncio.Future[None] | None = None
        self.shortcut: Shortcut | None = None
        """Asked about tokens before the reader sees them."""
        self._unread = {request.request_id for request in requests}
        self.requests = requests
        self.pending = dict.fromkeys(request.request_id for request in requests)
        """Requests whose last event has not come, in order."""
        self.has_begun = False
        """Whether any event has come: then it cannot be sent to another engine."""
        self.is_again = False
        """Whether it was or will be sent a second time."""

    def request(self, request_id: str) -> Request:
        """Return one of the requests."""
        return next(r for r in self.requests if r.request_id == request_id)

    def put_last(self, event: FinishedEvent | ErrorEvent) -> None:
        """Take the last event of a request; for the client."""
        self.pending.pop(event.request_id, None)
        self.waiting.append(event)

    def deliver(self) -> None:
        """Do something about what waits: for the client, when it has put in what it has."""
        self.has_begun = True
        reader = self._reader
        if reader is None or reader.done():  # done: cancelled, nobody reads any more
            return
        if self.shortcut is not None:
            self.shortcut(self.waiting)
        if self.waiting:
            self._reader = None
            reader.set_result(None)

    def fail(self, message: str, code: ErrorCode) -> None:
        """End all that is pending with an error; for the client."""
        for request_id in list(self.pending):
            self._client.forget(request_id)
            self.put_last(ErrorEvent(request_id=request_id, code=code, message=message))
        self.deliver()

    def lose(self, reason: str) -> None:
        """End all that is pending because its engine is gone; for the client."""
        if self.has_begun:
            self.fail(f"the answer was cut off: {reason}", "engine_failed")
        else:
            self.fail(
                f"the engine was lost before this request had begun ({reason}); send the request again",
                NOT_BEGUN,
            )

    async def __aenter__(self) -> Self:
        try:
            await self._client.send(self)
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

    async def __anext__(self) -> RequestEvent | bytes:
        if not self._unread:
            raise StopAsyncIteration
        if self.waiting and self.shortcut is not None:
            self.shortcut(self.waiting)
        if not self.waiting:
            # By hand, because a queue costs as much again: this is done for every token of every stream.
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        event = self.waiting.popleft()
        if isinstance(event, Exception):
            raise event
        if not isinstance(event, TokensEvent | bytes):
            self._unread.discard(event.request_id)
        return event

    def abort(self, request_id: str) -> None:
        """Stop one request early; no further event of it matters."""
        self._unread.discard(request_id)
        if request_id in self.pending:
            del self.pending[request_id]
            self._client.abort(request_id)

    def _abort_pending(self) -> None:
        for request_id in list(self.pending):
            self.abort(request_id)
