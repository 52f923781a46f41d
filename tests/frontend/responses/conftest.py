"""A frontend that speaks real Harmony over a scripted engine, for the Responses API."""

from __future__ import annotations

import contextlib
import json

import pytest

from rose.frontend.config import FrontendConfig
from rose.frontend.formatters.registry import build_formatter

TOOLS = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]


class Room:
    """A running frontend and how to talk to it."""

    def __init__(self, server, o200k):
        self.server = server
        self.http = server.http
        self._o200k = o200k

    async def create(self, status=200, **body):
        """Make a response; return its JSON, or its events where stream is set."""
        response = await self.http.post("/v1/responses", json={"model": "m", "input": "Hi", **body})
        assert response.status_code == status, response.text
        return sse(response.text) if body.get("stream") and status == 200 else response.json()

    async def get(self, path, status=200, **query):
        response = await self.http.get(f"/v1/responses/{path}", params=query)
        assert response.status_code == status, response.text
        is_stream = response.headers["content-type"].startswith("text/event-stream")
        return sse(response.text) if is_stream else response.json()

    async def post(self, path, status=200, **body):
        response = await self.http.post(f"/v1/responses/{path}", json=body)
        assert response.status_code == status, response.text
        return response.json()

    def prompt(self, place=-1):
        """Return the tokens of a prompt that the engine was sent."""
        return self.server.engine.requests[place].prompt_token_ids

    def prompt_text(self, place=-1):
        return b"".join(map(self._o200k.token_bytes, self.prompt(place))).decode()


def sse(text):
    """Return the events of a stream, which are numbered from the first on without a gap."""
    events = []
    for block in filter(None, text.split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    numbers = [event["sequence_number"] for event in events]
    assert not numbers or numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return events


@pytest.fixture(scope="session")
def harmony(o200k):
    return build_formatter("harmony", o200k)


@pytest.fixture
def talk(lab, harmony, o200k):
    """Return a function that runs a scenario against answers given as Harmony text (or as lines of a script)."""

    def talk(scenario, *answers, config=None, **engine_fields):
        lines = [
            lab.line(o200k.encode_with_control(answer)) if isinstance(answer, str) else answer
            for answer in answers
        ]
        settings = FrontendConfig(conversation_date="none", **(config or {}))

        async def run():
            async with contextlib.AsyncExitStack() as stack:
                serving = lab.serving(*lines, formatter=harmony, config=settings, **engine_fields)
                await scenario(Room(await stack.enter_async_context(serving), o200k))

        lab.run(run)

    return talk


@pytest.fixture
def line(lab, o200k):
    """Return a function that makes a line of the engine's script from Harmony text."""
    return lambda text, **fields: lab.line(o200k.encode_with_control(text), **fields)
