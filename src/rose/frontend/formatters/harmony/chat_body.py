"""The messages of a chat-completions body as Harmony messages."""

from __future__ import annotations

import json
from typing import Any

from rose.frontend.formatters.harmony.conversation import (
    Conversation,
    assemble,
    call_message,
    developer_message,
    problem,
    read_name,
    read_response_format,
    read_text,
    read_tools,
    result_message,
)
from rose.frontend.formatters.harmony.messages import Message

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_chat(body: dict[str, Any]) -> Conversation:
    """Return the conversation of a chat-completions body.

    Raises   FormatError for the first field that cannot be rendered
    """
    listed = body.get("messages")
    if not isinstance(listed, list) or not listed:
        raise problem("messages", listed, "a list with at least one message")
    history: list[Message] = []
    call_names: dict[str, str] = {}
    for i, message in enumerate(listed):
        history += _read_message(message, f"messages[{i}]", call_names)
    return assemble(
        body,
        history,
        effort=_effort(body),
        tools=read_tools(body),
        response_format=read_response_format(body.get("response_format"), "response_format"),
    )


def _effort(body: dict[str, Any]) -> Any:
    nested = body.get("reasoning")
    inner = nested.get("effort") if isinstance(nested, dict) else None
    return body["reasoning_effort"] if body.get("reasoning_effort") is not None else inner


def _read_message(message: Any, where: str, call_names: dict[str, str]) -> list[Message]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in _ROLES:
        raise problem(f"{where}.role", role, ", ".join(_ROLES))
    if role == "assistant":
        return _read_assistant(message, where, call_names)
    texts = read_text(message.get("content"), f"{where}.content")
    if role in ("system", "developer"):
        return [developer_message(texts)]
    if role == "user":
        name = message.get("name")
        name = None if name is None else read_name(name, f"{where}.name")
        return [Message(role="user", name=name, content=texts)]
    return [result_message(_answered_name(message, where, call_names), texts)]


def _answered_name(message: dict[str, Any], where: str, call_names: dict[str, str]) -> str:
    if message["role"] == "function":
        return read_name(message.get("name"), f"{where}.name")
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str) or call_id not in call_names:
        known = ", ".join(call_names) or "none, as no earlier message has tool_calls"
        raise problem(f"{where}.tool_call_id", call_id, f"the id of an earlier call ({known})")
    return call_names[call_id]


def _read_assistant(
    message: dict[str, Any], where: str, call_names: dict[str, str]
) -> list[Message]:
    """Return reasoning, then text, then calls; text beside calls is a preamble on commentary."""
    messages = []
    reasoning = message.get("reasoning")
    reasoning = reasoning if reasoning is not None else message.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise problem(f"{where}.reasoning", reasoning, "a string")
    if reasoning:
        messages.append(Message(role="assistant", channel="analysis", content=(reasoning,)))
    calls = _read_calls(message, where, call_names)
    texts = _assistant_texts(message, where)
    if any(texts) or (texts and not calls):
        channel = "commentary" if calls else "final"
        messages.append(Message(role="assistant", channel=channel, content=texts))
    if not messages and not calls:
        raise problem(f"{where}.content", None, "a string where there are no tool_calls")
    return messages + calls


def _assistant_texts(message: dict[str, Any], where: str) -> tuple[str, ...]:
    if message.get("content") is not None:
        return read_text(message["content"], f"{where}.content")
    refusal = message.get("refusal")
    return (refusal,) if isinstance(refusal, str) else ()


def _read_calls(message: dict[str, Any], where: str, call_names: dict[str, str]) -> list[Message]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise problem(f"{where}.tool_calls", calls, "a list of calls")
    messages = []
    for i, call in enumerate(calls):
        place = f"{where}.tool_calls[{i}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise problem(f"{place}.function", function, "an object with name and arguments")
        messages.append(_read_call(function, f"{place}.function"))
        if isinstance(call.get("id"), str):
            call_names[call["id"]] = function["name"]
    if isinstance(message.get("function_call"), dict):
        messages.append(_read_call(message["function_call"], f"{where}.function_call"))
    return messages


def _read_call(function: dict[str, Any], where: str) -> Message:
    name = read_name(function.get("name"), f"{where}.name")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # some clients send back the object that they parsed
        arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    if not isinstance(arguments, str):
        raise problem(f"{where}.arguments", arguments, "a string of JSON")
    return call_message(name, arguments)
