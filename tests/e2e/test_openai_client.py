"""openai-python against `rose serve --scripted`: helpers for streams and structured output, error classes, retries."""

from __future__ import annotations

import asyncio
import socket

import pytest
from pydantic import BaseModel

openai = pytest.importorskip("openai", reason="the openai client library is not installed")

SCRIPT = [
    {
        "needs": ["Book it"],
        "text": "<|channel|>analysis<|message|>A trip.<|end|><|start|>assistant<|channel|>final<|message|>"
        '{"city":"Oslo","days":[3,4]}<|return|>',
    },
    {
        "needs": ["Call it"],
        "text": "<|channel|>commentary to=functions.Trip <|constrain|>json<|message|>"
        '{"city":"Rome","days":[1]}<|call|>',
    },
    {"needs": ["Fail late"], "text": "<|channel|>final<|message|>one two", "error": "device lost"},
    {"needs": ["Fail at once"], "text": "", "error": {"code": "queue_full", "message": "full"}},
    {"text": "<|channel|>final<|message|>Hello é<|return|>", "delay_ms": 1},
]


KEY = "a-key-of-the-tests"


class Trip(BaseModel):
    city: str
    days: list[int]


@pytest.fixture(scope="module")
def server(scripted):
    with scripted(SCRIPT, "--context-tokens", "4096", "--api-key", KEY) as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def _asked(text="Hi", **fields):
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def test_structured_output_is_parsed(client):
    whole = client.chat.completions.parse(**_asked("Book it"), response_format=Trip)
    assert whole.choices[0].message.parsed == Trip(city="Oslo", days=[3, 4])
    with client.chat.completions.stream(**_asked("Book it"), response_format=Trip) as stream:
        partial = [event.parsed for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Trip(city="Oslo", days=[3, 4])
    assert {"city": "Oslo"} in partial
    response = client.responses.parse(model="m", input="Book it", text_format=Trip)
    assert response.output_parsed == Trip(city="Oslo", days=[3, 4])
    with client.responses.stream(model="m", input="Book it", text_format=Trip) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == Trip(city="Oslo", days=[3, 4])
    assert "response.reasoning_text.done" in kinds


def test_tool_arguments_are_parsed(client):
    tool = openai.pydantic_function_tool(Trip)
    whole = client.chat.completions.parse(**_asked("Call it"), tools=[tool])
    [call] = whole.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Trip(city="Rome", days=[1])
    assert whole.choices[0].finish_reason == "tool_calls"


def test_the_stream_helper_tells_pieces_and_the_whole(client):
    options = {"stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**_asked(), **options) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    text = "".join(event.delta for event in events if event.type == "content.delta")
    [done] = [event for event in events if event.type == "content.done"]
    assert text == done.content == final.choices[0].message.content == "Hello é"
    assert final.usage.completion_tokens == final.usage.total_tokens - final.usage.prompt_tokens
    chunks = list(client.chat.completions.create(**_asked(), stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_async_client_runs_many_streams_at_once(server):
    async def one(client):
        stream = await client.chat.completions.create(**_asked(), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
            return await asyncio.gather(*(one(client) for _ in range(20)))

    assert asyncio.run(all_of_them()) == ["Hello é"] * 20


WRONG = {
    "no such model": (openai.NotFoundError, "model_not_found", "model", {"model": "gpt-4"}),
    "unknown field": (
        openai.BadRequestError,
        "unknown_field",
        "tempreature",
        {"extra_body": {"tempreature": 1}},
    ),
    "out of range": (openai.BadRequestError, "invalid_request", "top_p", {"top_p": 2}),
    "too long": (
        openai.BadRequestError,
        "context_length_exceeded",
        "max_completion_tokens",
        {"max_completion_tokens": 5000},
    ),
}


@pytest.mark.parametrize(("kind", "code", "param", "fields"), WRONG.values(), ids=WRONG)
def test_refusals_have_the_class_of_openais(client, kind, code, param, fields):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{**_asked(), **fields})
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id.startswith("req_")
    with pytest.raises(kind):
        client.chat.completions.create(**{**_asked(), **fields}, stream=True)


def test_a_failure_in_a_stream_is_an_error_after_what_was_sent(client):
    chunks = []
    with pytest.raises(openai.APIError, match="device lost"):
        chunks.extend(client.chat.completions.create(**_asked("Fail late"), stream=True))
    stream = client.chat.completions.create(**_asked("Fail late"), stream=True)
    text = "".join(next(stream).choices[0].delta.content or "" for _ in range(3))
    assert text == "one two"


def test_a_wrong_key_is_an_authentication_error(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"


def test_a_full_queue_is_tried_again_as_often_as_the_client_is_told(server, monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=2) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(**_asked("Fail at once"))
        assert caught.value.status_code in (429, 503)
        wait = float(caught.value.response.headers["retry-after"])
        assert slept == [wait, wait]
        slept.clear()
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**_asked(), top_p=2)
        assert slept == []


def test_nobody_there_is_a_connection_error():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with (
            openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client,
            pytest.raises(openai.APIConnectionError),
        ):
            client.models.list()
