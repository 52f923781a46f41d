"""Answers of the embedded model in the form that was asked for, at temperature 1 and whatever the model has learnt."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import jsonschema
import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from fakes import inner_engine
from rose.cli.serve import EMBEDDED_MODEL
from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig
from rose.engine.engine import LLMEngine
from rose.frontend.formatters.harmony.formatter import HarmonyFormatter
from rose.frontend.tokenizer import load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["book", "film", "song"]},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "rating": {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.5},
                {"type": "null"},
            ]
        },
        "tags": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z]{1,8}$"},
            "minItems": 1,
            "maxItems": 3,
        },
        "author": {"$ref": "#/$defs/person"},
        "released": {"type": "string", "format": "date"},
        "is_new": {"type": "boolean"},
    },
    "required": ["title", "kind", "year", "rating", "tags", "author", "released", "is_new"],
    "additionalProperties": False,
    "$defs": {
        "person": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 16},
                "born": {"type": ["integer", "null"], "minimum": 1800, "maximum": 2020},
            },
            "required": ["name", "born"],
            "additionalProperties": False,
        }
    },
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "work", "strict": True, "schema": SCHEMA}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}, "hours": {"enum": [12, 24]}},
            "required": ["zone", "hours"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [WEATHER, CLOCK]
SCHEMAS = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}
CLOCK_SCHEMA = SCHEMAS["clock"]
SMALL = {"type": "json_schema", "json_schema": {"name": "clock", "schema": CLOCK_SCHEMA}}
VALID = jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker()).validate


@pytest.fixture(scope="module")
def formatter():
    return HarmonyFormatter(load_tokenizer(EMBEDDED_MODEL))


@pytest.fixture(scope="module")
def engine():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    config = EngineConfig(
        model=str(EMBEDDED_MODEL),
        device="cpu",
        cache=CacheConfig(kv_tokens=65_536),
    )
    yield LLMEngine.from_config(config, is_overlapped=True)
    torch.set_num_threads(before)


def _ask(engine, formatter, bodies):
    """Return the answers to chat bodies sent at once."""

    async def one(http, body):
        body = {"model": "m", "temperature": 1, "max_tokens": 1500, **body}
        response = await http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def all_of_them():
        async with inner_engine.serving(engine, formatter) as (http, _):
            return await asyncio.gather(*(one(http, body) for body in bodies))

    return asyncio.run(all_of_them())


def _said(text="What is the weather in Paris?"):
    return [{"role": "user", "content": text}]


def _bodies(count, **fields):
    """Bodies with seeds of their own."""
    texts = ["What is the weather in Paris?", "2+2?", "Tell me of a book.", "Ωμέγα 😀 <|end|>"]
    return [
        {
            "messages": _said(texts[seed % len(texts)]),
            "seed": seed,
            **fields,
        }
        for seed in range(count)
    ]


def _check_schema_answers(engine, formatter, count):
    answers = _ask(engine, formatter, _bodies(count, response_format=FORMAT))
    assert [a["choices"][0]["finish_reason"] for a in answers] == ["stop"] * count
    for answer in answers:
        VALID(json.loads(answer["choices"][0]["message"]["content"]))


def _check_required_calls(engine, formatter, count):
    answers = _ask(engine, formatter, _bodies(count, tools=TOOLS, tool_choice="required"))
    for answer in answers:
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert not choice["message"]["content"]
        _check_calls(choice["message"], SCHEMAS)
        assert len(choice["message"]["tool_calls"]) == 1


def _check_calls(message, schemas):
    for call in message.get("tool_calls", []):
        function = call["function"]
        assert function["name"] in schemas
        if schemas[function["name"]] is not None:
            jsonschema.validate(json.loads(function["arguments"]), schemas[function["name"]])


def test_a_schema_is_always_obeyed(engine, formatter):
    _check_schema_answers(engine, formatter, 4)


def test_a_required_call_always_comes_with_arguments_of_its_schema(engine, formatter):
    _check_required_calls(engine, formatter, 6)


def test_the_handed_case_of_a_forced_call(engine, formatter):
    """tests/data/handed.jsonl: api-tool-choice-required."""
    lines = (Path(__file__).parents[1] / "data" / "handed.jsonl").read_text().splitlines()
    [case] = [c for c in map(json.loads, lines) if c["id"] == "api-tool-choice-required"]
    expected = case["expected"]["if_finish_reason_not_length"]
    [answer] = _ask(engine, formatter, [case["input"]["body"]])
    [choice] = answer["choices"]
    if choice["finish_reason"] != "length":
        assert choice["finish_reason"] == expected["finish_reason"]
        names = [c["function"]["name"] for c in choice["message"]["tool_calls"]]
        assert len(names) >= expected["tool_calls_min"]
        assert set(names) <= set(expected["names_subset_of"])


def test_responses_are_held_to_the_same_forms(engine, formatter):
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    form = {"type": "json_schema", **FORMAT["json_schema"]}
    shared = {"model": "m", "input": "Tell me of a book.", "temperature": 1, "seed": 3}
    bodies = [
        {**shared, "text": {"format": form}, "max_output_tokens": 1500},
        {**shared, "tools": flat, "tool_choice": "required", "max_output_tokens": 1500},
    ]

    async def both():
        async with inner_engine.serving(engine, formatter) as (http, _):
            posts = [http.post("/v1/responses", json=body) for body in bodies]
            return [response.json() for response in await asyncio.gather(*posts)]

    said, called = asyncio.run(both())
    # as in chat, the reasoning may take every token
    assert {said["status"], called["status"]} <= {"completed", "incomplete"}
    if said["status"] == "completed":
        VALID(json.loads(said["output"][-1]["content"][0]["text"]))
    if called["status"] == "completed":
        call = called["output"][-1]
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])


def test_strict_arguments_hold_wherever_the_model_calls(engine, formatter):
    tools = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]
    answers = _ask(engine, formatter, _bodies(4, tools=tools, max_tokens=100))
    messages = [answer["choices"][0] for answer in answers]
    for choice in messages:
        if choice["finish_reason"] == "tool_calls":
            _check_calls(choice["message"], {"get_weather": SCHEMAS["get_weather"]})


def test_a_named_or_allowed_function_is_the_only_one_called(engine, formatter):
    named = {"type": "function", "function": {"name": "clock"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    bodies = _bodies(2, tools=TOOLS, tool_choice=named)
    bodies += _bodies(4, tools=TOOLS, tool_choice=allowed, max_tokens=100)
    answers = _ask(engine, formatter, bodies)
    for answer in answers[:2]:
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
    for answer in answers:
        choice = answer["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            _check_calls(choice["message"], {"clock": SCHEMAS["clock"]})


def test_a_limit_in_the_middle_of_json_ends_with_length(engine, formatter):
    [whole] = _ask(engine, formatter, _bodies(1, response_format=SMALL))
    num_tokens = whole["usage"]["completion_tokens"]
    [cut] = _ask(engine, formatter, _bodies(1, response_format=SMALL, max_tokens=num_tokens - 5))
    text = whole["choices"][0]["message"]["content"]
    assert cut["choices"][0]["finish_reason"] == "length"
    assert text.startswith(cut["choices"][0]["message"]["content"])
    assert cut["choices"][0]["message"]["content"] != text
    [call] = _ask(engine, formatter, _bodies(1, tools=TOOLS, tool_choice="required", max_tokens=8))
    assert call["choices"][0]["finish_reason"] == "length"


def test_a_stream_with_logprobs_and_two_choices_is_the_same_answer(engine, formatter):
    [body] = _bodies(1, response_format=SMALL, n=2, logprobs=True, top_logprobs=2)
    body |= {"model": "m", "max_tokens": 1500, "parallel_tool_calls": False}

    async def both():
        async with inner_engine.serving(engine, formatter) as (http, _):
            whole = await http.post("/v1/chat/completions", json=body)
            streamed = await http.post("/v1/chat/completions", json={**body, "stream": True})
            return whole.json(), streamed.text

    whole, text = asyncio.run(both())
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    pieces = [choice for line in lines for choice in json.loads(line)["choices"]]
    for choice in whole["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), CLOCK_SCHEMA)
        mine = [p for p in pieces if p["index"] == choice["index"]]
        said = "".join(p["delta"].get("content") or "" for p in mine)
        assert said == choice["message"]["content"]
        scores = choice["logprobs"]["content"]
        assert b"".join(bytes(s["bytes"]) for s in scores).decode() == said
    assert len(whole["choices"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(1400)  # many minutes on a CPU, more where other work runs beside it
def test_a_schema_is_obeyed_in_200_answers(engine, formatter):
    _check_schema_answers(engine, formatter, 200)


@pytest.mark.slow
@pytest.mark.timeout(1400)  # as above
def test_200_required_calls_come(engine, formatter):
    _check_required_calls(engine, formatter, 200)
