"""A scripted engine behind an in-process channel: the frontend's view of an engine, without sockets."""

from __future__ import annotations

import asyncio
import time

from rose.protocol.event import EngineStatus, FromEngine
from rose.protocol.request import Abort, Request, ToEngine
from rose.server.scripted import ScriptConfig, ScriptedEngine, ScriptLine


def line(tokens, **fields) -> ScriptLine:
    """Return one line of a script."""
    return ScriptLine(tokens=list(tokens), **fields)


class FakeEngine:
    """Implements `rose.frontend.client.Channel`; remembers what it was sent."""

    def __init__(self, *lines: ScriptLine, is_ready: bool = True, **fields) -> None:
        config = ScriptConfig(address="", model="m", lines=list(lines) or [ScriptLine()], **fields)
        self.scripted = ScriptedEngine(config)
        self.is_ready = is_ready
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.is_closed = False
        self._events: asyncio.Queue[list[FromEngine]] = asyncio.Queue()

    async def send(self, message: ToEngine) -> None:
        if isinstance(message, Request):
            self.requests.append(message)
        if isinstance(message, Abort):
            self.aborted.append(message.request_id)
        self._put(self.scripted.take(message, time.monotonic()))

    async def receive(self) -> list[FromEngine]:
        while self._events.empty():
            self._put(self.scripted.step(time.monotonic()))
            await asyncio.sleep(0.001)
        return self._events.get_nowait()

    def close(self) -> None:
        self.is_closed = True

    def drop(self) -> None:
        self.is_closed = True

    def _put(self, events: list[FromEngine]) -> None:
        if not self.is_ready:
            events = [_loading(e) if isinstance(e, EngineStatus) else e for e in events]
        if events:
            self._events.put_nowait(events)


def _loading(status: EngineStatus) -> EngineStatus:
    return EngineStatus(
        is_ready=False,
        model=status.model,
        context_tokens=status.context_tokens,
        vocab_size=status.vocab_size,
        detail="loading layer 3 of 24",
    )
