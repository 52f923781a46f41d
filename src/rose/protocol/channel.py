"""The socket between the two services: blocking on the engine's side, asyncio on the frontend's.

The engine binds, frontends connect; any may start first. An event goes to the frontend whose request it belongs to, the
engine's state to all. Addresses are ipc://PATH, tcp://HOST:PORT, or an in-process pair for tests. What travels is
codec's business.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import deque
from typing import Any

import zmq
import zmq.asyncio

from rose.protocol.codec import (
    ProtocolError,
    decode_from_engine,
    decode_to_engine,
    encode_from_engine,
    encode_to_engine,
)
from rose.protocol.event import EngineStatus, ErrorEvent, FinishedEvent, FromEngine, TokensEvent
from rose.protocol.request import Abort, Request, ToEngine
from rose.utils.errors import ConfigError

QUEUED_FRAMES = 100_000
"""Frames a stalled peer may leave in the queue; guessed: minutes of steps, well under a gigabyte."""
MAX_OWED_FRONTENDS = 64
"""Of frontends that are gone so many may come back and learn what they missed."""
GREETING = b"rose frontend"
"""A frontend's first frame: the engine's state goes to whom it has heard of, also while it reads no messages."""
FRAMES_PER_READ = 256
"""Taken from the socket at once; more wait for the next call."""
EVENTS_PER_READ = 2048
"""Taken by a frontend at once, frames whole: what is there is sent on together. About 5 ms of its work."""
LINGER_MS = 500
"""How long `close` waits for frames already sent; the last events of a stopping engine matter."""

_pair_numbers = itertools.count()


ENGINE_NOTICE = "engine.json"
"""File beside an engine's socket that tells frontends of other processes which engine there is."""


class EngineEndpoint:
    """The engine's side: polls for messages, sends the events of a step; for one thread."""

    def __init__(self, address: str, *, context: zmq.Context | None = None) -> None:
        self._owns_context = context is None
        self._context = context or zmq.Context()
        # ROUTER tells which frontend a frame came from, and says so where one that is gone is sent something.
        self._socket = _new_socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # one that comes back is the same
        self._frontends: dict[bytes, None] = {}
        """Those heard of, in the order in which they came."""
        self._owners: dict[str, bytes] = {}
        """Request -> the frontend it came from, until its last event."""
        self._lost: dict[str, bool] = {}
        """Request -> whether its frontend is gone; or it only takes no events."""
        self._owed: dict[bytes, list[FromEngine]] = {}
        """Last events that a frontend has not taken yet."""
        self._unread: deque[tuple[bytes, bytes]] = deque()
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise _address_error("bind", address, error) from error

    def receive(self, timeout_ms: int = 0) -> ToEngine | None:
        """Return the next message, or None where none comes in time.

        Raises  ProtocolError for a broken frame; the next call goes on with the next frame.
        """
        end = time.monotonic() + timeout_ms / 1000
        while True:
            if not self._unread:
                self._read()
            while not self._unread:
                # A greeting wakes it too, and is no message.
                left_ms = round((end - time.monotonic()) * 1000)
                if left_ms <= 0 or not self._socket.poll(left_ms, zmq.POLLIN):
                    return None
                self._read()
            frontend, frame = self._unread.popleft()
            message = decode_to_engine(frame)
            if self._is_taken(message, frontend):
                return message

    def _is_taken(self, message: ToEngine, frontend: bytes) -> bool:
        """Return whether a message may pass: a request's id belongs to the frontend that used it first."""
        if isinstance(message, Request):
            owner = self._owners.get(message.request_id, frontend)
            if owner == frontend or not self._is_there(owner):
                self._owners[message.request_id] = frontend
                return True
            text = (
                f"request_id {message.request_id!r} is still running for another frontend; ids must be unique among "
                "running requests; choose another"
            )
            error = ErrorEvent(
                request_id=message.request_id, code="duplicate_request_id", message=text
            )
            self._send(frontend, [error])
            return False
        return not isinstance(message, Abort) or (
            self._owners.get(message.request_id, frontend) == frontend
        )

    def _is_there(self, frontend: bytes) -> bool:
        try:
            self._transmit(frontend, encode_from_engine([]))
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            if error.errno != zmq.EAGAIN:
                raise
        return True

    def send(self, events: list[FromEngine]) -> bool:
        """Send events without waiting, to each frontend in one frame; False: no frontend took any.

        What a frontend does not take is dropped, but for last events: it gets those once it takes events again.
        """
        shares: dict[bytes, list[FromEngine]] = {}
        owner_of, last_owner, share = self._owners.get, None, []
        for event in events:
            if (
                type(event) is TokensEvent
            ):  # nearly always, 128 in a step: the rest waits behind this question
                owner = owner_of(event.request_id)
            elif isinstance(event, EngineStatus):
                self._read()  # frontends that nobody has heard of yet are told too
                for frontend in self._frontends:
                    shares.setdefault(frontend, []).append(event)
                continue
            elif isinstance(event, ErrorEvent) and event.code == "duplicate_request_id":
                owner = owner_of(event.request_id)  # the first of that id runs on
            else:
                owner = self._owners.pop(event.request_id, None)
            if owner != last_owner:
                last_owner, share = owner, [] if owner is None else shares.setdefault(owner, [])
            share.append(event)
        sent = [self._send(frontend, share) for frontend, share in shares.items()]
        return any(sent)

    def take_lost(self) -> dict[str, bool]:
        """Return the requests of which a frontend has not taken an event, each once; they are to be ended.

        Units  request -> whether its frontend is gone; False: it is there and takes no events
        """
        lost, self._lost = self._lost, {}
        return lost

    def _send(self, frontend: bytes, events: list[FromEngine]) -> bool:
        owed = self._owed.get(frontend, [])
        frame = encode_from_engine([*owed, *events] if owed else events)
        try:
            self._transmit(frontend, frame)
        except zmq.ZMQError as error:
            is_gone = error.errno == zmq.EHOSTUNREACH
            if is_gone:
                self._frontends.pop(frontend, None)
            elif error.errno != zmq.EAGAIN:
                raise
            self._miss(frontend, events, is_gone=is_gone)
            return False
        self._owed.pop(frontend, None)
        return True

    def _transmit(self, frontend: bytes, frame: bytes) -> None:
        # What can fail does so at the first part; send_multipart would take four times as long.
        self._socket.send(frontend, zmq.NOBLOCK | zmq.SNDMORE)
        self._socket.send(frame, zmq.NOBLOCK)

    def _miss(self, frontend: bytes, events: list[FromEngine], *, is_gone: bool) -> None:
        """Take note of events that a frontend did not take."""
        last = [e for e in events if isinstance(e, FinishedEvent | ErrorEvent)]
        self._owed[frontend] = [*self._owed.pop(frontend, []), *last]
        while len(self._owed) > MAX_OWED_FRONTENDS:
            self._owed.pop(next(iter(self._owed)))
        is_only_state = all(isinstance(e, EngineStatus) for e in events)
        if not is_only_state or frontend not in self._frontends:
            mine = (n for n, owner in self._owners.items() if owner == frontend)
            self._lost |= dict.fromkeys(mine, is_gone)

    def _read(self) -> None:
        """Take in what has come, some of it: also from frontends not heard of before."""
        for _ in range(FRAMES_PER_READ):
            # Asked first: nothing is there at most steps, and an exception costs more than the question.
            if not self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                return
            frontend, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            self._frontends[frontend] = None
            if frames != [GREETING]:
                self._unread.append((frontend, b"".join(frames)))

    def close(self) -> None:
        """Deliver what was sent (half a second at most) and close."""
        self._socket.close(LINGER_MS)
        if self._owns_context:
            self._context.term()


class FrontendEndpoint:
    """The frontend's side, for one event loop: create it inside that loop."""

    def __init__(self, address: str, *, context: zmq.Context | None = None) -> None:
        self._owns_context = context is None
        plain = context or zmq.Context()
        self._plain_context = plain
        asynchronous = zmq.asyncio.Context.shadow(plain)
        self._socket: zmq.asyncio.Socket = _new_socket(asynchronous, zmq.DEALER)
        self._plain_socket = zmq.Socket.shadow(self._socket)
        """The same socket, for what is there already: a tenth of the time of an awaited read."""
        self._error: ProtocolError | None = None
        """Of a frame that came right after others; those go first."""
        self._socket.setsockopt(zmq.ROUTING_ID, b"f" + uuid.uuid4().bytes)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise _address_error("connect to", address, error) from error
        self._plain_socket.send(GREETING, zmq.NOBLOCK)

    async def send(self, message: ToEngine) -> None:
        """Queue one message; it is delivered when the engine is there."""
        await self._socket.send(encode_to_engine(message))

    async def receive(self) -> list[FromEngine]:
        """Wait for the next frame and return its events and those of the frames behind it, in order.

        Raises  ProtocolError for a broken frame; the next call goes on with the next frame.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
        first = self._next()
        if first is None:
            first = await self._socket.recv()
        else:
            await asyncio.sleep(0)  # an engine that is always ahead would let nobody else run
        events = decode_from_engine(first)
        while len(events) < EVENTS_PER_READ and (frame := self._next()) is not None:
            try:
                events += decode_from_engine(frame)
            except ProtocolError as error:
                self._error = error
                break
        return events

    def _next(self) -> bytes | None:
        """Return the next frame if it is there."""
        is_there = self._plain_socket.get(zmq.EVENTS) & zmq.POLLIN  # type: ignore[operator]
        return self._plain_socket.recv(zmq.NOBLOCK) if is_there else None

    def close(self) -> None:
        """Deliver what was sent (half a second at most) and close; a waiting `receive` is cancelled."""
        self._close(LINGER_MS)

    def drop(self) -> None:
        """Close at once; what the engine has not read is lost."""
        self._close(0)

    def _close(self, linger_ms: int) -> None:
        self._socket.close(linger_ms)
        if self._owns_context:
            self._plain_context.term()


class LocalPair:
    """Both sides in one process, for tests: the same classes over shared memory.

    Make the engine's side first. `frontend` must be called inside the event loop that uses it.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._address = f"inproc://rose-{next(_pair_numbers)}"
        self.engine = EngineEndpoint(self._address, context=self._context)

    def frontend(self) -> FrontendEndpoint:
        """Return the frontend's side."""
        return FrontendEndpoint(self._address, context=self._context)

    def close(self) -> None:
        """Close the engine's side and, once the frontend's is closed, the context."""
        self.engine.close()
        self._context.destroy(linger=0)


def _new_socket(context: zmq.Context, kind: int) -> Any:
    socket = context.socket(kind)
    socket.set_hwm(QUEUED_FRAMES)
    return socket


def _address_error(verb: str, address: str, error: zmq.ZMQError) -> ConfigError:
    return ConfigError(
        f"cannot {verb} {address!r}: {error}; allowed: ipc://PATH (a writable folder, path up to 100 characters) "
        "or tcp://HOST:PORT (a free port); change the engine channel's address"
    )
