"""Tokens that are sent on the spot: the same bytes in the same order, whoever sends them, however slow the client."""

from __future__ import annotations

import asyncio
import json

import pytest

from rose.frontend.formatters.registry import build_formatter

TEXT = (
    "<|channel|>analysis<|message|>Let me see é 𠮷.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"city": "Paris"}<|end|><|start|>assistant<|channel|>final<|message|>It is "4".\n'
    "<|return|>"
)


@pytest.fixture(scope="module")
def harmony(o200k):
    return build_formatter("harmony", o200k)


class Client:
    """An ASGI client that reads as it likes; `is_reading` unset makes the server wait, as a full socket does."""

    def __init__(self, app, body):
        self._app, self._body = app, json.dumps(body).encode()
        self.is_reading = asyncio.Event()
        self.is_reading.set()
        self.parts: list[bytes] = []
        self.num_waits = 0

    async def _receive(self):
        if self._body is None:
            await asyncio.sleep(60)
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message):
        if not self.is_reading.is_set():
            self.num_waits += 1
            await self.is_reading.wait()
        if message["type"] == "http.response.body" and message["body"]:
            self.parts.append(message["body"])

    async def run(self):
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "root_path": "",
            "server": ("rose", 80),
        }
        await self._app(scope, self._receive, self._send)


def _body(**fields):
    return {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True} | fields


def _text(parts, index):
    found = {"content": "", "reasoning": "", "arguments": ""}
    for block in b"".join(parts).decode().split("\n\n"):
        if block.startswith("data: {"):
            for choice in json.loads(block[6:])["choices"]:
                if choice["index"] == index:
                    delta = choice["delta"]
                    found["content"] += delta.get("content", "")
                    found["reasoning"] += delta.get("reasoning", "")
                    for piece in delta.get("tool_calls", ()):
                        found["arguments"] += piece["function"]["arguments"]
    return found


@pytest.mark.parametrize("pauses", [False, True])
def test_a_client_that_reads_in_fits_gets_all_in_order(lab, harmony, o200k, pauses):
    async def scenario():
        line = lab.line(o200k.encode_with_control(TEXT), delay_ms=2)
        async with lab.serving(line, formatter=harmony) as server:
            client = Client(server.app, _body(n=2))
            running = asyncio.ensure_future(client.run())
            while not running.done():
                await asyncio.sleep(0.005)
                if pauses and client.is_reading.is_set() and 3 < len(client.parts) < 40:
                    client.is_reading.clear()
                else:
                    client.is_reading.set()
            await running
            for index in (0, 1):
                assert _text(client.parts, index) == {
                    "reasoning": "Let me see é 𠮷.",
                    "arguments": '{"city": "Paris"}',
                    "content": 'It is "4".\n',
                }
            assert client.parts[-1].endswith(b"data: [DONE]\n\n")
            assert bool(client.num_waits) is pauses

    lab.run(scenario)


def test_a_bug_while_tokens_are_sent_ends_that_answer_only(lab, harmony, o200k, monkeypatch):
    from rose.frontend.sse import ChunkWriter

    async def scenario():
        line = lab.line(o200k.encode_with_control(TEXT), delay_ms=1)
        async with lab.serving(line, formatter=harmony) as server:
            right = ChunkWriter.template
            monkeypatch.setattr(ChunkWriter, "template", lambda *_: 1 / 0)
            wrong = lab.sse(await server.chat(stream=True))
            assert wrong[-2]["error"]["code"] == "internal_error"
            assert wrong[-1] == "[DONE]"
            monkeypatch.setattr(ChunkWriter, "template", right)
            assert lab.sse(await server.chat(stream=True))[-2]["choices"][0]["finish_reason"]

    lab.run(scenario)


def test_most_tokens_take_the_short_way(lab, harmony, o200k, monkeypatch):
    """Or the speed that benchmarks/frontend_stream.py measures is gone, and no other test would tell."""
    from rose.frontend.stream import AnswerResponse

    sent, right = [], AnswerResponse._send_now

    def send_now(self, part):
        sent.append(part)
        return right(self, part)

    async def scenario():
        monkeypatch.setattr(AnswerResponse, "_send_now", send_now)
        tokens = o200k.encode_with_control("<|channel|>final<|message|>" + " word" * 50)
        async with lab.serving(lab.line(tokens, delay_ms=1), formatter=harmony) as server:
            assert (await server.chat(stream=True)).status_code == 200
        assert len(sent) > 40

    lab.run(scenario)
