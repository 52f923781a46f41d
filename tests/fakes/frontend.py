"""A frontend in front of a fake engine, without sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx

from fakes import engine as fake_engine
from fakes import formatter as fake_format
from fakes import openai_schemas
from rose.frontend.access import read_keys
from rose.frontend.app import create_app
from rose.frontend.client import EngineClient
from rose.frontend.config import FrontendConfig
from rose.frontend.jobs import Formatters, JobMaker
from rose.frontend.metrics import Metrics


class Server:
    """What a test needs of a running frontend."""

    def __init__(self, app, http, client, engine, formatter, metrics):
        self.app = app
        self.metrics = metrics
        self.http = http
        self.client = client
        self.engine = engine
        self.formatter = formatter

    async def chat(self, **body):
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **body}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **body):
        return await self.http.post("/v1/completions", json={"model": "m", "prompt": "Hi", **body})


@contextlib.asynccontextmanager
async def serving(
    *lines, config=None, is_ready=True, raise_bugs=True, formatter=None, text=None, **engine_fields
):
    """Start a frontend whose engine answers request by request with `lines`; answers are schema-checked."""
    config = config or FrontendConfig(conversation_date="none")
    engine = fake_engine.FakeEngine(*lines, is_ready=is_ready, **engine_fields)
    formatter = formatter or fake_format.FakeFormatter()
    client = EngineClient(engine, timeout_s=config.engine_timeout_s)
    jobs = JobMaker(
        config, Formatters(chat=formatter, text=text or formatter), model_names=("m", "alias")
    )
    keys = read_keys(config, {})
    metrics = Metrics()
    app = create_app(config, client, jobs, metrics, keys=keys)
    async with app.router.lifespan_context(app):
        for _ in range(200):
            if client.status is not None:
                break
            await asyncio.sleep(0.001)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=raise_bugs)
        hooks = {"response": [_check]}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://rose", event_hooks=hooks
        ) as http:
            yield Server(app, http, client, engine, formatter, metrics)


async def _check(response):
    await response.aread()
    kind = response.headers.get("content-type", "")
    request = response.request
    openai_schemas.check_response(
        request.url.path, response.status_code, kind, response.text, method=request.method
    )


def run(scenario):
    """Run one async scenario within a time limit."""
    return asyncio.run(asyncio.wait_for(scenario(), 20))


def sse(response):
    """Return the events of a stream: parsed JSON, and the string [DONE]."""
    events = []
    for block in response.text.split("\n\n"):
        if block:
            assert block.startswith("data: ")
            data = block.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
    return events


class Lab:
    """Everything tests of the frontend need, by name."""

    serving = staticmethod(serving)
    run = staticmethod(run)
    sse = staticmethod(sse)
    line = staticmethod(fake_engine.line)
    reasoning = staticmethod(fake_format.reasoning)
    content = staticmethod(fake_format.content)
    call = staticmethod(fake_format.call)
    END = fake_format.END
