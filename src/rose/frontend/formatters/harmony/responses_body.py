"""The items of a Responses body as Harmony messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rose.frontend.formatters.harmony.conversation import (
    Conversation,
    assemble,
    call_message,
    developer_message,
    problem,
    read_name,
    read_namespaces,
    read_response_format,
    read_text,
    read_tools,
    result_message,
)
from rose.frontend.formatters.harmony.messages import Message

_Called = dict[str, str]
"""`name` of a function, and `namespace` where it has one of its own."""
_ROLES = ("system", "developer", "user", "assistant")
_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
_PHASES = {"commentary": "commentary", "final_answer": "final"}


def read_responses(body: dict[str, Any]) -> Conversation:
    """Return the conversation of a Responses body whose earlier turns are in `input`.

    `sampled_tokens`, which no client can give, has the tokens that were sampled for some items, by their place in
    `input`; those items are repeated by them.

    Raises   FormatError for the first field that cannot be rendered
    """
    if body.get("previous_response_id") is not None:
        raise problem(
            "previous_response_id", body["previous_response_id"], "a body with that turn put in"
        )
    items = input_items(body.get("input"))
    history = [developer_message((_instructions(body),))] if _instructions(body) else []
    calls: dict[str, _Called] = {}
    sampled = body.get("sampled_tokens", {})
    for i, item in enumerate(items):
        read = _read_item(item, f"input[{i}]", calls, items[i + 1 :])
        if i in sampled and len(read) == 1:
            read = [replace(read[0], token_ids=sampled[i])]
        history += read
    text = body.get("text")
    asked_format = text.get("format") if isinstance(text, dict) else None
    reasoning = body.get("reasoning")
    return assemble(
        body,
        history,
        effort=reasoning.get("effort") if isinstance(reasoning, dict) else None,
        tools=read_tools(body),
        namespaces=read_namespaces(body),
        response_format=read_response_format(asked_format, "text.format"),
    )


def with_stored_turn(stored: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Return a request with the input and output of the stored turn that it follows put before its own input."""
    output = stored.get("output", [])
    if not isinstance(output, list):
        raise problem("stored_turn.output", output, "a list of items")
    items = [*input_items(stored.get("input")), *output, *input_items(request.get("input"))]
    return {**request, "input": items, "previous_response_id": None}


def input_items(value: Any) -> list[Any]:
    """Return `input` as a list of items; a string is one message of the user."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise problem("input", value, "a string or a list with at least one item")
    return value


def _instructions(body: dict[str, Any]) -> str:
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise problem("instructions", instructions, "a string")
    return instructions or ""


def _read_item(
    item: Any, where: str, calls: dict[str, _Called], following: Sequence[Any]
) -> list[Message]:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        return [_read_message(item, where, following)]
    if kind == "reasoning":
        return _read_reasoning(item, where)
    if kind == "function_call":
        return [_read_call(item, where, calls)]
    if kind == "function_call_output":
        call_id = item.get("call_id")
        if not isinstance(call_id, str) or call_id not in calls:
            known = ", ".join(calls) or "none, as no earlier item is a function_call"
            raise problem(f"{where}.call_id", call_id, f"the call_id of an earlier call ({known})")
        texts = read_text(item.get("output"), f"{where}.output")
        return [result_message(texts=texts, **calls[call_id])]
    raise problem(f"{where}.type", kind, ", ".join(_ITEMS))


def _read_message(item: dict[str, Any], where: str, following: Sequence[Any]) -> Message:
    role = item.get("role")
    if role not in _ROLES:
        raise problem(f"{where}.role", role, ", ".join(_ROLES))
    texts = read_text(item.get("content"), f"{where}.content")
    if role in ("system", "developer"):
        return developer_message(texts)
    if role == "user":
        return Message(role="user", content=texts)
    asked = item.get("phase")
    phase = _PHASES.get(asked) if isinstance(asked, str) else None
    channel = phase or ("commentary" if _is_call_next(following) else "final")
    return Message(role="assistant", channel=channel, content=texts)


def _is_call_next(following: Sequence[Any]) -> bool:
    kinds = [item.get("type") for item in following if isinstance(item, dict)]
    after_reasoning = [kind for kind in kinds if kind != "reasoning"]
    return after_reasoning[:1] == ["function_call"]


def _read_reasoning(item: dict[str, Any], where: str) -> list[Message]:
    """Return the chain of thought; its summary only where the thought itself is not there."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise problem(f"{where}.content", parts, "a list of text parts")
    texts = []
    for i, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise problem(f"{where}.content[{i}].text", text, "a string")
        texts.append(text)
    return (
        [Message(role="assistant", channel="analysis", content=tuple(texts))] if any(texts) else []
    )


def _read_call(item: dict[str, Any], where: str, calls: dict[str, _Called]) -> Message:
    called: _Called = {"name": read_name(item.get("name"), f"{where}.name")}
    if item.get("namespace") is not None:
        called["namespace"] = read_name(item["namespace"], f"{where}.namespace")
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        raise problem(f"{where}.arguments", arguments, "a string of JSON")
    if isinstance(item.get("call_id"), str):
        calls[item["call_id"]] = called
    return call_message(arguments=arguments, **called)
