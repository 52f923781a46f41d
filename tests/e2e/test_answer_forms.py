"""Answers of the embedded model in the form that was asked for, at temperature 1 and whatever the model has learnt."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
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
VALID = jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker()).validate


@pytest.fixture(scope="module")
def formatter():
    return HarmonyFormatter(load_tokenizer(EMBEDDED_MODEL))


@pytest.fixture(scope="module", params=[False, True], ids=["in_turn", "overlapped"])
def engine(request):
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    config = EngineConfig(
        model=str(EMBEDDED_MODEL),
        device="cpu",
        cache=CacheConfig(kv_tokens=65_536),
    )
    yield LLMEngine.from_config(config, is_overlapped=request.param)
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
    """Bodies with seeds of their own. The bias lets models end their reasoning that never learnt to."""
    texts = ["What is the weather in Paris?", "2+2?", "Tell me of a book.", "Ωμέγα 😀 <|end|>"]
    return [
        {"messages": _said(texts[seed % len(texts)]), "seed": seed, **fields}
        for seed in range(count)
    ]


def _check_schema_answers(engine, formatter, count):
    answers = _ask(engine, formatter, _bodies(count, response_format=FORMAT))
    reasons = Counter(a["choices"][0]["finish_reason"] for a in answers)
    for answer in answers:
        [choice] = answer["choices"]
        if choice["finish_reason"] == "stop":
            VALID(json.loads(choice["message"]["content"]))
        else:
            # the reasoning took every token: nothing of an answer may stand there half
            assert choice["finish_reason"] == "length"
    assert reasons["stop"] >= 0.9 * count, reasons


def _check_required_calls(engine, formatter, count):
    answers = _ask(engine, formatter, _bodies(count, tools=TOOLS, tool_choice="required"))
    names = Counter()
    for answer in answers:
        [choice] = answer["choices"]
        if choice["finish_reason"] == "length":
            names["cut"] += 1
            continue
        assert choice["finish_reason"] == "tool_calls"
        assert not choice["message"]["content"]
        [call] = choice["message"]["tool_calls"]
        jsonschema.validate(
            json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]]
        )
        names[call["function"]["name"]] += 1
    assert names["cut"] <= 0.1 * count, names


def test_a_schema_is_always_obeyed(engine, formatter):
    _check_schema_answers(engine, formatter, 6)


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


@pytest.mark.slow
def test_a_schema_is_obeyed_in_200_answers(engine, formatter):
    _check_schema_answers(engine, formatter, 200)


@pytest.mark.slow
def test_200_required_calls_come(engine, formatter):
    _check_required_calls(engine, formatter, 200)
