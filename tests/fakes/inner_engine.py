"""A real engine in the process of the test, behind the frontend's view of a channel: both services, no sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

import httpx

from fakes import openai_schemas
from rose.engine.engine import LLMEngine
from rose.frontend.app import create_app
from rose.frontend.client import EngineClient
from rose.frontend.config import FrontendConfig
from rose.frontend.jobs import Formatters, JobMaker
from rose.frontend.metrics import Metrics
from rose.protocol.codec import (
    decode_from_engine,
    decode_to_engine,
    encode_from_engine,
    encode_to_engine,
)
from rose.protocol.grammar import Vocabulary
from rose.protocol.request import Abort, Request, StatusQuery


class InnerEngine:
    """Implements `rose.frontend.client.Channel`; every message goes through the codec."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.requests: list[Request] = []
        self._events: deque = deque([engine.status()])
        self._wake = asyncio.Event()

    async def send(self, message) -> None:
        message = decode_to_engine(encode_to_engine(message))
        match message:
            case Request():
                self.requests.append(message)
                self._events += self.engine.add(message)
            case Abort():
                self._events += self.engine.abort(message.request_id)
            case StatusQuery():
                self._events.append(self.engine.status())
            case Vocabulary():
                self.engine.learn(message)
        self._wake.set()

    async def receive(self):
        while not self._events:
            if self.engine.has_work:
                self._events += self.engine.step()
                await asyncio.sleep(0)
            else:
                self._wake.clear()
                await self._wake.wait()
        events = decode_from_engine(encode_from_engine(list(self._events)))
        self._events.clear()
        return events

    def close(self) -> None:
        for request_id in self.engine.running_ids():
            self.engine.abort(request_id)

    drop = close


@contextlib.asynccontextmanager
async def serving(engine: LLMEngine, formatter, *, config=None):
    """Yield an HTTP client and the channel of a frontend over a real engine; answers are schema-checked."""
    config = config or FrontendConfig(conversation_date="none")
    channel = InnerEngine(engine)
    client = EngineClient(channel, timeout_s=600.0)
    jobs = JobMaker(config, Formatters(chat=formatter, text=formatter), model_names=("m",))
    app = create_app(config, client, jobs, Metrics())
    async with app.router.lifespan_context(app):
        while not client.is_ready:
            await asyncio.sleep(0.001)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app),
            base_url="http://rose",
            event_hooks={"response": [_check]},
            timeout=None,
        ) as http:
            yield http, channel


async def _check(response) -> None:
    await response.aread()
    kind = response.headers.get("content-type", "")
    request = response.request
    openai_schemas.check_response(
        request.url.path, response.status_code, kind, response.text, method=request.method
    )
