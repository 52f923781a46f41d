"""Reasoning modes: hidden sends no analysis text anywhere, debug sends every message as it was written."""

from __future__ import annotations

import json

import pytest

from rose.frontend.config import FrontendConfig
from rose.frontend.formatters.registry import build_formatter
from rose.frontend.reasoning import MODES

SECRET = "secret"
"""Stands in every kind of text that is reasoning, and in no other; one token, so that no stream cuts it."""
ANSWERS = {
    "plain": f"<|channel|>analysis<|message|>{SECRET} one<|end|><|start|>assistant<|channel|>final<|message|>Hi.",
    "built-in call": f"<|channel|>analysis to=python<|message|>print('{SECRET}')<|call|>",
    "made-up turn": "<|channel|>commentary<|message|>Wait.<|end|><|start|>functions.f to=assistant<|channel|>"
    f"commentary<|message|>{SECRET}<|end|><|start|>assistant<|channel|>final<|message|>So.",
    "cut": f"<|channel|>analysis<|message|>{SECRET}",
    "cut in the header": f"<|channel|>analysis {SECRET}",
    "no message token": f"<|channel|>analysis<|end|><|channel|>analysis {SECRET} {SECRET}<|end|>",
    "call": f"<|channel|>analysis<|message|>{SECRET}<|end|><|start|>assistant to=functions.f<|channel|>commentary "
    '<|constrain|>json<|message|>{"a": 1}<|call|>',
    "error": f"<|channel|>analysis<|message|>{SECRET}",
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def harmony(o200k):
    return build_formatter("harmony", o200k)


def _line(lab, o200k, name):
    fields = {"error": "out of memory"} if name == "error" else {}
    return lab.line(o200k.encode_with_control(ANSWERS[name]), tokens_per_event=3, **fields)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("is_server", [True, False], ids=["server", "request"])
def test_hidden_sends_no_reasoning_anywhere(lab, harmony, o200k, name, is_server):
    config = FrontendConfig(reasoning="hidden" if is_server else "debug", conversation_date="none")
    asked = {} if is_server else {"reasoning_mode": "hidden"}

    async def scenario():
        line = _line(lab, o200k, name)
        async with lab.serving(line, formatter=harmony, config=config) as server:
            for extra in (
                {},
                {"stream": True},
                {"logprobs": True, "top_logprobs": 3},
                {"stream": True, "logprobs": True},
                {"tools": TOOLS, "tool_choice": "none"},
                {"include_reasoning": True} if is_server else {"include_reasoning": False},
            ):
                response = await server.chat(**asked, **extra)
                assert SECRET not in response.text, extra
                assert "reasoning_content" not in response.text

    lab.run(scenario)


def test_the_secret_is_sent_where_it_is_not_hidden(lab, harmony, o200k):
    async def scenario():
        for name in ANSWERS:
            async with lab.serving(_line(lab, o200k, name), formatter=harmony) as server:
                response = await server.chat(stream=True)
                assert SECRET in response.text, name

    lab.run(scenario)


def test_hidden_reasoning_is_counted(lab, harmony, o200k):
    async def scenario():
        async with lab.serving(_line(lab, o200k, "plain"), formatter=harmony) as server:
            usages = [(await server.chat(reasoning_mode=mode)).json()["usage"] for mode in MODES]
            assert usages[0]["completion_tokens_details"]["reasoning_tokens"] > 0
            assert usages == [usages[0]] * 3

    lab.run(scenario)


def test_debug_shows_channels_and_recipients_as_they_came(lab, harmony, o200k):
    text = (
        f"<|channel|>analysis<|message|>{SECRET} <|constrain|>x<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"
    )
    expected = [("analysis", None, f"{SECRET} <|constrain|>x"), ("commentary", "functions.f", "{}")]

    async def scenario():
        line = lab.line(o200k.encode_with_control(text))
        async with lab.serving(line, formatter=harmony) as server:
            body = (await server.chat(tools=TOOLS, reasoning_mode="debug", stop="sec")).json()
            message = body["choices"][0]["message"]
            found = [(m["channel"], m["recipient"], m["content"]) for m in message["raw_messages"]]
            assert found == expected
            assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
            assert "<|" not in message["reasoning"]

            response = await server.chat(tools=TOOLS, reasoning_mode="debug", stream=True)
            assert _folded(lab.sse(response)[:-1]) == message["raw_messages"]
            usual = await server.chat(tools=TOOLS, stream=True)
            assert "raw_messages" not in usual.text

    lab.run(scenario)


def _folded(chunks):
    messages = []
    for chunk in chunks:
        for piece in chunk["choices"][0]["delta"].get("raw_messages", []):
            if piece["index"] == len(messages):
                messages.append(piece)
            else:
                messages[piece["index"]]["content"] += piece["content"]
    return messages


@pytest.mark.parametrize(
    ("server_mode", "fields", "code"),
    [
        ("visible", {"reasoning_mode": "some"}, "invalid_request"),
        ("visible", {"reasoning_mode": "debug", "include_reasoning": False}, "invalid_request"),
        ("hidden", {"reasoning_mode": "visible"}, "unsupported_value"),
        ("hidden", {"reasoning_mode": "debug"}, "unsupported_value"),
    ],
)
def test_modes_that_cannot_be_had_are_refused(lab, server_mode, fields, code):
    async def scenario():
        async with lab.serving(config=FrontendConfig(reasoning=server_mode)) as server:
            response = await server.chat(**fields)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["code"], error["param"]) == (code, "reasoning_mode")

    lab.run(scenario)


def test_hidden_closes_the_routes_that_return_what_was_sampled(lab):
    async def scenario():
        async with lab.serving(config=FrontendConfig(reasoning="hidden")) as server:
            response = await server.complete()
            assert response.status_code == 403
            assert response.json()["error"]["code"] == "permission_denied"
            assert "/v1/chat/completions" in response.json()["error"]["message"]

    lab.run(scenario)


def test_effort_may_come_in_an_object(lab, harmony, o200k):
    async def scenario():
        async with lab.serving(_line(lab, o200k, "plain"), formatter=harmony) as server:
            for fields in ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}):
                assert (await server.chat(**fields)).status_code == 200
            first, second = (json.dumps(r.prompt_token_ids) for r in server.engine.requests)
            assert first == second

    lab.run(scenario)
