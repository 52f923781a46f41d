"""Chat requests that ask for a form: what travels to the engine, and what is refused before it does."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest

from rose.frontend.config import FrontendConfig
from rose.frontend.formatters.registry import build_formatter
from rose.frontend.formatters.shape import AnswerShape
from rose.frontend.grammar.build import GrammarBuilder, json_text
from rose.frontend.grammar.checker import Checker, CheckerUnavailable, Text
from rose.protocol.request import Request

OBJECT = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def _tool(name, **fields):
    return {"type": "function", "function": {"name": name, "parameters": OBJECT, **fields}}


def _format(schema, **fields):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **fields}}


def _named(name):
    return {"type": "function", "function": {"name": name}}


def _allowed(mode, *names):
    tools = [_named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TOOLS = [_tool("f"), _tool("g")]
HOW = "<|channel|>final<|message|>{}<|return|>"


NOT = {"type": "object", "properties": {"a": {"not": {}}}}
LATE = {"oneOf": [{"type": "number"}, {"type": "integer"}]}
ASKED = [
    ({"response_format": _format(OBJECT)}, {"analysis", "final"}, {"final"}),
    ({"response_format": {"type": "json_object"}}, {"analysis", "final"}, {"final"}),
    (
        {"response_format": _format(OBJECT), "tools": TOOLS},
        {"analysis", "final", "f", "g"},
        {"final", "f", "g"},
    ),
    ({"tools": TOOLS, "tool_choice": "required"}, {"analysis", "f", "g"}, {"f", "g"}),
    ({"tools": TOOLS, "tool_choice": _named("g")}, {"analysis", "g"}, {"g"}),
    ({"tools": TOOLS, "tool_choice": _allowed("required", "f")}, {"analysis", "f"}, {"f"}),
    (
        {"tools": TOOLS, "tool_choice": _allowed("auto", "f")},
        {"analysis", "preamble", "final", "f"},
        {"analysis", "preamble", "final", "f"},
    ),
    (
        {"tools": [_tool("f", strict=True), _tool("g")]},
        {"analysis", "preamble", "final", "f", "g"},
        {"analysis", "preamble", "final", "f", "g"},
    ),
]
REFUSED = [
    (
        {"response_format": _format(NOT)},
        "unsupported_value",
        "response_format.json_schema.schema",
        "'not'",
    ),
    ({"response_format": _format(LATE)}, "unsupported_value", "response_format", "oneOf"),
    (
        {"response_format": _format(3)},
        "invalid_request",
        "response_format.json_schema.schema",
        "3",
    ),
    (
        {"response_format": {"type": "json_schema"}},
        "invalid_request",
        "response_format.schema",
        "missing",
    ),
    ({"response_format": {"type": "yaml"}}, "invalid_request", "response_format", "yaml"),
    ({"response_format": "json"}, "invalid_request", "response_format", "json"),
    (
        {"response_format": _format(OBJECT, regex="a")},
        "invalid_request",
        "response_format.json_schema",
        "regex",
    ),
    (
        {"response_format": _format({"pattern": "(?=a)", "type": "string"})},
        "unsupported_value",
        "response_format",
        "look-around",
    ),
    (
        {"tools": [_tool("f", strict=True, parameters=NOT)]},
        "unsupported_value",
        "tools[0].function.parameters",
        "'not'",
    ),
    (
        {"tools": [_tool("f", strict=True, parameters={"type": "string"})]},
        "invalid_request",
        "tools[0].function.parameters",
        "allowed: object",
    ),
    ({"tool_choice": "required"}, "invalid_request", "tool_choice", "without tools"),
    ({"tools": TOOLS, "tool_choice": "always"}, "invalid_request", "tool_choice", "always"),
    ({"tools": TOOLS, "tool_choice": _named("h")}, "invalid_request", "tool_choice", "f, g"),
    (
        {"tools": TOOLS, "tool_choice": _allowed("auto")},
        "invalid_request",
        "tool_choice",
        "allowed_tools",
    ),
    ({"tools": TOOLS, "tool_choice": 7}, "invalid_request", "tool_choice", "7"),
    (
        {"tools": TOOLS, "tool_choice": "required", "min_tokens": 3},
        "invalid_request",
        "min_tokens",
        "leave min_tokens out",
    ),
    (
        {"response_format": {"type": "json_object"}, "ignore_eos": True},
        "invalid_request",
        "ignore_eos",
        "leave ignore_eos out",
    ),
    (
        {"tools": [_tool(f"f{i}") for i in range(200)], "tool_choice": "required"},
        "invalid_request",
        "tools",
        "allowed: 128",
    ),
]


@pytest.fixture(scope="module")
def harmony(o200k):
    return build_formatter("harmony", o200k)


@pytest.fixture
def ask(lab, harmony, o200k):
    """Return a function that sends a body to a server of its own and returns the response and the engine's requests."""

    def ask(*bodies, config=None):
        return _ask(lab, harmony, o200k, bodies, config=config)

    return ask


@pytest.fixture(scope="module")
def asked(lab, harmony, o200k):
    """Return, for each body of ASKED and REFUSED, the response and the engine's requests; all asked of one server."""
    bodies = [case[0] for case in (*ASKED, *REFUSED)]

    async def scenario():
        found = []
        line = lab.line(o200k.encode_with_control(HOW))
        async with lab.serving(line, formatter=harmony) as server:
            for body in bodies:
                server.engine.requests.clear()
                response = await server.chat(**body)
                found.append((response, list(server.engine.requests)))
        return found

    return dict(zip(map(json.dumps, bodies), lab.run(scenario), strict=True))


def _ask(lab, harmony, o200k, bodies, *, config=None):
    async def scenario():
        line = lab.line(o200k.encode_with_control(HOW))
        async with lab.serving(line, formatter=harmony, config=config) as server:
            responses = [await server.chat(**body) for body in bodies]
            return responses, server.engine.requests

    return lab.run(scenario)


@pytest.fixture
def texts_of(o200k):
    """Return a function from a request to its grammars, token ids written as the tokens' names."""

    def texts(request: Request):
        assert request.constraint is not None
        found = []
        for grammar in request.constraint.grammars:
            text = grammar.text
            for token in set(int(t) for t in _ids(text)):
                name = o200k.token_bytes(token).decode()
                text = text.replace(f"<[{token}]>", name)
            found.append(text)
        return found

    return texts


def _ids(text):
    return [part.partition("]>")[0] for part in text.split("<[")[1:]]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"tools": [_tool("f", strict=True)], "tool_choice": "none"},
        {"tools": [_tool("f", strict=False)]},
    ],
    ids=str,
)
def test_nothing_waits_where_no_form_was_asked_for(ask, body):
    [response], [request] = ask(body)
    assert response.status_code == 200
    assert request.constraint is None


@pytest.mark.parametrize(("body", "first", "later"), ASKED, ids=range(len(ASKED)))
def test_the_messages_that_may_be_written(asked, texts_of, o200k, body, first, later):
    response, [request] = asked[json.dumps(body)]
    assert response.status_code == 200
    grammars = request.constraint.grammars
    end, is_open = o200k.control_id("<|end|>"), "preamble" in first
    late = [] if is_open else [[]]
    assert [g.starts for g in grammars] == [[[]], [[end]], *late]
    assert [_messages(text) for text in texts_of(request)] == [first, *[later] * (1 + len(late))]
    # A quarter of the tokens is kept for an answer that must come.
    assert request.constraint.late == (None if is_open else 2)
    kept = min(request.max_tokens // 4, 4096)
    assert request.constraint.late_after == request.max_tokens - kept
    ends = {o200k.control_name(i) for i in range(o200k.vocab_size)} - {None}
    ends -= {o200k.control_name(i) for i in request.constraint.banned_ids}
    assert ends == ({"<|end|>", "<|return|>", "<|call|>"} if is_open else {"<|end|>"})


def _messages(text):
    """The names of a grammar's messages; calls by the function."""
    found = set()
    for line in text.splitlines()[1:]:
        name, _, rule = line.partition(":")
        if name.startswith("call_"):
            name = rule.partition(" = functions .")[2].split()[0]
        found.add(name)
    return found


def test_arguments_follow_strict_schemas_and_are_free_otherwise(ask, texts_of):
    strict, free = _tool("f", strict=True), _tool("g")
    body = {"tools": [strict, free]}
    _, [request] = ask(body)
    lines = {line.partition(":")[0]: line for line in texts_of(request)[0].splitlines()}
    assert '"additionalProperties": false' in lines["call_0"]
    assert lines["call_0"].endswith("<|call|>")
    assert lines["call_1"].endswith("<|message|>")


def test_a_forced_call_without_strict_takes_any_object_where_its_schema_cannot_be_enforced(
    ask, texts_of
):
    odd = _tool("f", parameters={"type": "object", "properties": {"a": {"not": {}}}})
    late = _tool(
        "f", parameters={"oneOf": [{"type": "object"}, {"type": "object", "minProperties": 1}]}
    )
    for tool in (odd, late, _tool("f", parameters=None)):
        [response], [request] = ask({"tools": [tool], "tool_choice": "required"})
        assert response.status_code == 200
        assert '%json {"type": "object", "x-guidance"' in texts_of(request)[0]


@pytest.mark.parametrize(("body", "code", "param", "word"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_enforced_is_refused(asked, body, code, param, word):
    response, requests = asked[json.dumps(body)]
    assert requests == []
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    assert word in error["message"]


def test_a_schema_past_the_limit_is_refused_with_numbers(ask):
    config = FrontendConfig(conversation_date="none", max_schema_bytes=1024)
    body = {"response_format": _format({"enum": ["x" * 2000]})}
    [response], _ = ask(body, config=config)
    assert response.status_code == 400
    assert "allowed: 1024" in response.json()["error"]["message"]


def test_a_schema_that_takes_too_long_is_refused_and_holds_up_nobody(ask):
    # Each pattern more makes the library's work many times as long: 13 take a second.
    parts = [{"type": "string", "pattern": f".*[a-z]{{{i}}}.*(x|y){i}.*"} for i in range(1, 20)]
    config = FrontendConfig(conversation_date="none", grammar_build_seconds=0.5)
    body = {"response_format": _format({"allOf": parts})}
    good = {"response_format": _format(OBJECT)}
    responses, requests = ask(body, body, good, config=config)
    assert [r.status_code for r in responses] == [400, 400, 200]
    assert "more than 0.5 s" in responses[0].json()["error"]["message"]
    assert len(requests) == 1


def test_a_shape_is_built_once(harmony):
    builder = GrammarBuilder(harmony, build_seconds=20)

    async def scenario():
        def read():
            return AnswerShape(content=copy.deepcopy(OBJECT)), "p"

        return [await builder.constraint(read) for _ in range(3)]

    first, second, third = asyncio.run(scenario())
    builder.close()
    assert first is second is third
    assert (builder.num_built, builder.num_hits) == (1, 2)


def test_a_process_that_dies_is_told_and_replaced():
    checker = Checker(num_processes=1, seconds=20)
    text = Text("schema", json_text(OBJECT))
    assert checker.problems([text]) == [None]
    [process] = checker._all
    process._child.kill()
    process._child.wait()
    assert checker.problems([text, Text("grammar", "start: nonsense")])[0] is None
    child = process._child
    checker.close()
    assert child.poll() is not None


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("exec sleep 60", "was not ready after 0.2 s"),
        ("exit 1", "ended at once"),
        (None, "be started"),
    ],
)
def test_a_process_that_does_not_start_is_told_within_a_limit(tmp_path, monkeypatch, command, text):
    program = tmp_path / "python"
    if command is not None:
        program.write_text(f"#!/bin/sh\n{command}\n")
        program.chmod(0o700)
    monkeypatch.setattr("rose.frontend.grammar.checker.sys.executable", str(program))
    monkeypatch.setattr("rose.frontend.grammar.checker.START_SECONDS", 0.2)
    checker = Checker(num_processes=1, seconds=20)
    with pytest.raises(CheckerUnavailable, match=text):
        checker.problems([Text("schema", json_text(OBJECT))])
    monkeypatch.undo()
    assert checker.problems([Text("schema", json_text(OBJECT))]) == [None], "the next one may work"
    checker.close()


def test_every_choice_is_constrained(ask):
    [response], requests = ask({"response_format": _format(OBJECT), "n": 3})
    assert response.status_code == 200
    assert [r.constraint is not None for r in requests] == [True] * 3
    assert len(response.json()["choices"]) == 3
