"""The socket between the two services: blocking on the engine's side, asyncio on the frontend's.

The engine binds, the frontend connects; either may start first. One frontend per engine. Addresses are
ipc://PATH, tcp://HOST:PORT, or an in-process pair for tests. What travels is codec's business.
"""

from __future__ import annotations

import itertools
from typing import Any

import zmq
import zmq.asyncio

from rose.protocol.codec import (
    decode_from_engine,
    decode_to_engine,
    encode_from_engine,
    encode_to_engine,
)
from rose.protocol.event import FromEngine
from rose.protocol.request import ToEngine
from rose.utils.errors import ConfigError

QUEUED_FRAMES = 100_000
"""Frames a stalled peer may leave in the queue; guessed: minutes of steps, well under a gigabyte."""
LINGER_MS = 500
"""How long `close` waits for frames already sent; the last events of a stopping engine matter."""

_pair_numbers = itertools.count()


class EngineEndpoint:
    """The engine's side: polls for messages, sends the events of a step; for one thread."""

    def __init__(self, address: str, *, context: zmq.Context | None = None) -> None:
        self._owns_context = context is None
        self._context = context or zmq.Context()
        self._socket = _new_socket(self._context)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise _address_error("bind", address, error) from error

    def receive(self, timeout_ms: int = 0) -> ToEngine | None:
        """Return the next message, or None where none comes in time.

        Raises  ProtocolError for a broken frame; the next call goes on with the next frame.
        """
        if timeout_ms and not self._socket.poll(timeout_ms, zmq.POLLIN):
            return None
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return decode_to_engine(frame)

    def send(self, events: list[FromEngine]) -> bool:
        """Send the events as one frame without waiting; False: no frontend takes it, it is dropped."""
        try:
            self._socket.send(encode_from_engine(events), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

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
        self._socket: zmq.asyncio.Socket = _new_socket(zmq.asyncio.Context.shadow(plain))
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise _address_error("connect to", address, error) from error

    async def send(self, message: ToEngine) -> None:
        """Queue one message; it is delivered when the engine is there."""
        await self._socket.send(encode_to_engine(message))

    async def receive(self) -> list[FromEngine]:
        """Wait for the next frame and return its events, in order.

        Raises  ProtocolError for a broken frame; the next call goes on with the next frame.
        """
        return decode_from_engine(await self._socket.recv())

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


def _new_socket(context: zmq.Context) -> Any:
    # DEALER, not PAIR: PAIR does not reconnect over ipc and tcp.
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(QUEUED_FRAMES)
    return socket


def _address_error(verb: str, address: str, error: zmq.ZMQError) -> ConfigError:
    return ConfigError(
        f"cannot {verb} {address!r}: {error}; allowed: ipc://PATH (a writable folder, path up to 100 characters) "
        "or tcp://HOST:PORT (a free port); change the engine channel's address"
    )
