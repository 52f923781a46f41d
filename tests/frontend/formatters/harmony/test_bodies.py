"""Request bodies become Harmony messages, or errors that name the field."""

import copy
import json
import random

import pytest

from rose.frontend.formatters.base import FormatError
from rose.frontend.formatters.harmony.conversation import resolve_effort
from rose.frontend.formatters.harmony.formatter import HarmonyFormatter, read_conversation
from rose.frontend.formatters.harmony.responses_body import with_stored_turn
from rose.frontend.tokenizer import decode

USER = {"role": "user", "content": "Hi"}
PING = {"type": "function", "function": {"name": "ping", "description": "Checks."}}
CALL = {"id": "c1", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
CHAT = {
    "api": "chat",
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "ann"},
        {"role": "assistant", "content": "One moment.", "reasoning": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "up"},
        {"role": "assistant", "content": "It is up."},
        USER,
    ],
    "tools": [PING],
    "tool_choice": "auto",
    "reasoning_effort": "high",
    "conversation_date": "2026-01-15",
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
}
RESPONSES = {
    "api": "responses",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "One moment."}],
        },
        {"type": "function_call", "call_id": "c1", "name": "ping", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "up"},
        {"role": "assistant", "content": "It is up."},
        USER,
    ],
    "tools": [{"type": "function", "name": "ping", "description": "Checks."}],
    "reasoning": {"effort": "high"},
    "conversation_date": "2026-01-15",
    "text": {"format": {"type": "json_schema", "name": "s", "schema": {}}},
}
DIALOGUE = (
    "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
    "<|start|>assistant to=functions.ping<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"
    "<|start|>functions.ping to=assistant<|channel|>commentary<|message|>up<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is up.<|end|>"
    "<|start|>user<|message|>Hi<|end|><|start|>assistant"
)


@pytest.fixture(scope="module")
def formatter(o200k):
    return HarmonyFormatter(o200k)


@pytest.fixture(scope="module")
def text_of(formatter, o200k):
    return lambda body: decode(o200k, formatter.encode(body).token_ids)


def test_both_apis_give_the_same_prompt(text_of):
    chat = text_of(CHAT)
    assert chat.endswith("<|start|>user:ann<|message|>Hi<|end|>" + DIALOGUE)
    assert "\nCurrent date: 2026-01-15\n\nReasoning: high\n" in chat
    assert "# Instructions\n\nBe brief.\n\n# Tools\n\n## functions" in chat
    assert "# Response Formats\n\n## s\n\n{}<|end|>" in chat
    assert chat.replace("user:ann", "user") == text_of(RESPONSES)


def test_declared_tools_go_with_the_prompt(formatter):
    assert formatter.encode(CHAT).declared_tools == ["ping"]
    assert formatter.encode(RESPONSES).declared_tools == ["ping"]
    assert formatter.encode({"messages": [USER]}).declared_tools == []


def test_reasoning_of_a_pending_call_is_kept_and_of_a_finished_turn_dropped(text_of):
    pending = CHAT | {"messages": CHAT["messages"][:4]}
    assert "<|channel|>analysis<|message|>r<|end|>" in text_of(pending)
    assert "<|channel|>analysis" not in text_of(CHAT)


def test_reasoning_content_is_another_name_of_reasoning(text_of):
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    bodies = [
        {"messages": [USER, message | {name: "think"}]}
        for name in ("reasoning", "reasoning_content")
    ]
    assert "<|message|>think<|end|>" in text_of(bodies[0])
    assert text_of(bodies[0]) == text_of(bodies[1])


def test_leading_instructions_are_one_message_and_later_ones_keep_their_place(text_of):
    first, second, late = ({"role": "system", "content": t} for t in ("A", "B", "C"))
    text = text_of({"messages": [first, second, USER, late, USER]})
    user = "<|start|>user<|message|>Hi<|end|>"
    assert "<|start|>developer<|message|># Instructions\n\nA\n\nB<|end|>" + user in text
    assert user + "<|start|>developer<|message|># Instructions\n\nC<|end|>" + user in text


def test_empty_instructions_make_no_message(text_of):
    assert "developer" not in text_of({"messages": [{"role": "system", "content": ""}, USER]})


def test_tool_choice_none_hides_the_tools(formatter, text_of):
    body = CHAT | {"tool_choice": "none"}
    assert "namespace functions" not in text_of(body)
    assert "'functions'" not in text_of(body)
    assert formatter.encode(body).declared_tools == []


def test_allowed_tools_leaves_only_those(formatter):
    tools = [{"type": "function", "name": name} for name in ("a", "b", "c")]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [tools[0], tools[2]]}
    body = {"messages": [USER], "tools": tools, "tool_choice": choice}
    assert formatter.encode(body).declared_tools == ["a", "c"]


def test_a_chosen_function_does_not_change_the_prompt(text_of):
    choice = {"type": "function", "function": {"name": "ping"}}
    for value in ("required", choice):
        assert text_of(CHAT | {"tool_choice": value}) == text_of(CHAT)


@pytest.mark.parametrize(
    ("asked", "told"),
    [(None, "medium"), ("minimal", "low"), ("low", "low"), ("xhigh", "high"), ("max", "high")],
)
def test_effort_is_mapped_to_what_the_model_knows(asked, told):
    assert resolve_effort(asked) == told


def test_a_stored_turn_comes_before_the_request():
    stored = {"input": "Q", "output": [{"role": "assistant", "content": "A"}]}
    body = with_stored_turn(stored, {"previous_response_id": "r", "input": "Then?"})
    contents = [m.content[0] for m in read_conversation(body | {"api": "responses"}).messages[1:]]
    assert contents == ["Q", "A", "Then?"]


def test_phases_and_calls_say_the_channel_of_an_assistant_item():
    def channels(*items):
        read = read_conversation({"api": "responses", "input": ["x", *items][1:]})
        return [m.channel for m in read.messages[1:]]

    say = {"role": "assistant", "content": "t"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
    assert channels(say) == ["final"]
    assert channels(say, thought, call) == ["commentary", "analysis", "commentary"]
    assert channels(say | {"phase": "commentary"}) == ["commentary"]
    assert channels(say | {"phase": "final_answer"}, call) == ["final", "commentary"]


def chat(*messages, **fields):
    return {"messages": list(messages), **fields}


def responses(*items, **fields):
    return {"api": "responses", "input": list(items), **fields}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        (chat(), "messages"),
        (chat("x"), "messages[0].role"),
        (chat({"role": "robot", "content": "x"}), "messages[0].role"),
        (chat({"role": "user"}), "messages[0].content"),
        (chat({"role": "user", "content": [{"type": "image_url"}]}), "messages[0].content[0].type"),
        (chat(USER | {"name": "a b"}), "messages[0].name"),
        (chat(USER, {"role": "tool", "tool_call_id": "ghost", "content": "42"}), "messages[1].tool_call_id"),
        (chat({"role": "assistant", "content": None}), "messages[0].content"),
        (chat({"role": "assistant", "tool_calls": [{"id": "x"}]}), "messages[0].tool_calls[0].function"),
        (chat({"role": "assistant", "tool_calls": {}, "content": None}), "messages[0].content"),
        (chat({"role": "assistant", "tool_calls": "x"}), "messages[0].tool_calls"),
        (chat({"role": "assistant", "content": "x", "reasoning": 3}), "messages[0].reasoning"),
        (chat(USER, tools="x"), "tools"),
        (chat(USER, tools=[{"type": "web_search"}]), "tools[0].type"),
        (chat(USER, tools=[{"type": "function"}]), "tools[0].name"),
        (chat(USER, tools=[{"name": "a<|end|>"}]), "tools[0].name"),
        (chat(USER, tools=[{"name": "a", "parameters": []}]), "tools[0].parameters"),
        (chat(USER, tools=[{"name": "a", "description": 3}]), "tools[0].description"),
        (chat(USER, tool_choice="required"), "tool_choice"),
        (chat(USER, tools=[PING], tool_choice={"type": "function", "name": "b"}), "tool_choice"),
        (chat(USER, tools=[PING], tool_choice=7), "tool_choice"),
        (chat(USER, reasoning_effort="none"), "reasoning_effort"),
        (chat(USER, reasoning_effort=3), "reasoning_effort"),
        (chat(USER, conversation_date="today"), "conversation_date"),
        (chat(USER, response_format={"type": "xml"}), "response_format"),
        (chat(USER, response_format="x"), "response_format"),
        (chat(USER, api="soap"), "api"),
        (responses(), "input"),
        (responses(USER, previous_response_id="r"), "previous_response_id"),
        (responses(USER, instructions=[]), "instructions"),
        (responses({"type": "item_reference", "id": "x"}), "input[0].type"),
        (responses({"role": "tool", "content": "x"}), "input[0].role"),
        (responses({"type": "function_call_output", "call_id": "g", "output": "x"}), "input[0].call_id"),
        (responses({"type": "function_call", "name": "a"}), "input[0].arguments"),
        (responses({"type": "reasoning", "content": [3]}), "input[0].content[0].text"),
        (responses(USER, text={"format": {"type": "json_schema"}}), "text.format"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_wrong_field_is_named(formatter, body, param):
    with pytest.raises(FormatError) as caught:
        formatter.encode(body)
    assert caught.value.param == param
    message = str(caught.value)
    assert "found" in message
    assert "allowed" in message


def test_a_schema_nested_past_all_reason_is_an_error_not_a_crash(formatter):
    schema = {}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    tool = {"name": "deep", "parameters": schema}
    with pytest.raises(FormatError):
        formatter.encode(chat(USER, tools=[tool]))


def test_mutated_bodies_raise_nothing_but_format_errors(formatter):
    draw = random.Random(3)
    junk = [
        None,
        0,
        -1.5,
        True,
        "",
        "x",
        [],
        {},
        [None],
        {"type": []},
        {"type": "function"},
        "\ud800",
    ]
    num_rendered, unnamed = 0, []
    for _ in range(3000):
        body = copy.deepcopy(draw.choice([CHAT, RESPONSES]))
        for _ in range(draw.randint(1, 3)):
            place, key = draw.choice(_places(body))
            place[key] = copy.deepcopy(draw.choice(junk))
        try:
            formatter.encode(body)
            num_rendered += 1
        except FormatError as error:
            unnamed += [] if error.param else [json.dumps(body)]
    assert not unnamed
    assert 100 < num_rendered < 2900


def _places(value):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    inner = [(k, v) for k, v in items if isinstance(v, (dict, list))]
    here = [(value, k) for k in (value if isinstance(value, dict) else range(len(value)))]
    return here + [place for _, v in inner for place in _places(v)]
