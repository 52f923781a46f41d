"""Tokens that are sent on the spot: the same bytes in the same order, whoever sends them, however slow the client."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import deque

import pytest

from rose.frontend.chat import ChatFold, ChatWriter
from rose.frontend.formatters.registry import build_formatter
from rose.frontend.generation import ChoiceRun, Job, PieceMaker
from rose.frontend.metrics import Metrics
from rose.frontend.stream import ChunkSource
from rose.protocol.event import FinishedEvent, TokensEvent
from rose.protocol.request import Request

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


class Submission:
    """What a source needs of one."""

    def __init__(self):
        self.aborted = []

    def abort(self, request_id):
        self.aborted.append(request_id)


def _source(harmony, **options):
    """Return a chat answer of two choices, and what makes its pieces."""
    decoders = [harmony.decoder(declared_tools=["f"]) for _ in range(2)]
    job = Job(
        endpoint="chat",
        answer_id="a",
        model="m",
        created=0,
        num_prompt_tokens=1,
        requests=[
            Request(request_id=name, prompt_token_ids=[1], max_tokens=999) for name in ("a", "b")
        ],
        runs=[ChoiceRun(i, decoder, **options) for i, decoder in enumerate(decoders)],
        is_stream=True,
    )
    metrics = Metrics()
    source = ChunkSource(None, job, writer=ChatWriter(job), fold=ChatFold(job), metrics=metrics)
    return source, PieceMaker(job, metrics)


def _read(harmony, bursts, draw, *, is_short, options):
    """Read events as `JobSource.parts` does it, in bursts, with a client that takes what it likes."""
    source, maker = _source(harmony, **options)
    submission, waiting, sent = Submission(), deque(), []

    def send_now(parts):
        num_taken = draw.choice((len(parts), len(parts), draw.randint(0, len(parts))))
        sent.extend(parts[:num_taken])
        return num_taken

    send_waiting = source._shortcut(maker, submission)
    for burst in bursts:
        waiting += burst
        while waiting:
            if is_short and sent:  # the first part opens the answer
                source.send_now = send_now
            send_waiting(waiting)
            if not waiting:
                break
            event = waiting.popleft()
            if isinstance(event, bytes):
                sent.append(event)
                continue
            assert not isinstance(event, Exception), event
            piece = maker.take(event, submission)
            if piece is not None:
                sent.append(source.lines(piece))
    text = b"".join(sent).decode()
    return re.sub(r"call_[0-9a-f]{32}", "call", text), submission.aborted, source._job.usage()


@pytest.mark.parametrize("seed", range(20))
def test_tokens_in_bursts_are_the_same_bytes_as_tokens_one_by_one(harmony, o200k, seed):
    """Two choices whose tokens come in any mixture, several in an event at times, with clients of all kinds."""
    draw = random.Random(seed)
    texts = [TEXT * draw.randint(1, 3), TEXT[: draw.randint(60, len(TEXT))]]
    left = {
        name: [
            TokensEvent(request_id=name, token_ids=tokens)
            for tokens in _cut(o200k.encode_with_control(text), draw)
        ]
        + [FinishedEvent(request_id=name, reason="stop", num_prompt_tokens=1, num_output_tokens=9)]
        for name, text in zip("ab", texts, strict=True)
    }
    events = []
    while left:
        name = draw.choice(list(left))
        for _ in range(draw.choice((1, 1, 1, 5, 40))):
            if left[name]:
                events.append(left[name].pop(0))
        if not left[name]:
            del left[name]
    options = draw.choice(({}, {}, {"stop_strings": ("is",)}, {"max_calls": 1}))
    single = [[event] for event in events]
    bursts = list(_cut(events, draw, most=300))
    expected = _read(harmony, single, draw, is_short=False, options=options)
    assert _read(harmony, bursts, draw, is_short=True, options=options) == expected
    assert len(expected[0]) > 500


def _cut(items, draw, most=2):
    place = 0
    while place < len(items):
        size = draw.choice((1, 1, draw.randint(1, most)))
        yield items[place : place + size]
        place += size


def test_most_tokens_take_the_short_way(lab, harmony, o200k, monkeypatch):
    """Or the speed that benchmarks/frontend_stream.py measures is gone, and no other test would tell."""
    from rose.frontend.stream import AnswerResponse

    sent, right = [], AnswerResponse._send_now

    def send_now(self, parts):
        sent.extend(parts)
        return right(self, parts)

    async def scenario():
        monkeypatch.setattr(AnswerResponse, "_send_now", send_now)
        tokens = o200k.encode_with_control("<|channel|>final<|message|>" + " word" * 50)
        async with lab.serving(lab.line(tokens, delay_ms=1), formatter=harmony) as server:
            assert (await server.chat(stream=True)).status_code == 200
        assert len(sent) > 40

    lab.run(scenario)
