"""Items of a conversation in the one form in which they are kept, shown and rendered.

Clients send messages in several forms and give back items of earlier answers with whatever fields they had. Here
each becomes an object with an id, the fields OpenAI lists for it, and nothing else. Knows no formatter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rose.frontend.parsing import quoted, refuse

Item = dict[str, Any]
KINDS = ("message", "reasoning", "function_call", "function_call_output", "item_reference")
INPUT_ROLES = ("system", "developer", "user")
TEXT_PARTS = ("input_text", "output_text", "text")
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}
MAX_ID_CHARACTERS = 128

NewId = Callable[[str, int], str]
"""Makes an id of a prefix and a place in the input."""


def read_items(value: str | list[Any], new_id: NewId) -> list[Item]:
    """Return a request's `input` in the normal form; references stay references.

    Raises  RequestError naming the field by its path.
    """
    listed = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not listed:
        refuse("invalid_request", "input", "input is empty; give a string or at least one item")
    return [_read_item(item, f"input[{i}]", i, new_id) for i, item in enumerate(listed)]


def _read_item(item: Any, where: str, place: int, new_id: NewId) -> Item:
    if not isinstance(item, dict):
        refuse("invalid_request", where, f"{where} is {quoted(item)}; allowed: an object")
    kind = _kind(item)
    if kind == "item_reference":
        return {"type": kind, "id": _string(item, "id", where)}
    if not isinstance(kind, str) or kind not in PREFIXES:
        refuse(
            "unsupported_value",
            f"{where}.type",
            f"{where}.type is {quoted(kind)}; supported by this server: {', '.join(KINDS)}",
        )
    given = item.get("id")
    is_fit = isinstance(given, str) and 0 < len(given) <= MAX_ID_CHARACTERS
    head = {"id": given if is_fit else new_id(PREFIXES[kind], place), "type": kind}
    return {**head, **_READERS[kind](item, where)}


def _kind(item: Item) -> Any:
    kind = item.get("type")
    if kind is not None:
        return kind
    # Both may leave their type out: a message has a role, a reference nothing but an id.
    return "item_reference" if "role" not in item and "id" in item else "message"


def _read_message(item: Item, where: str) -> Item:
    role = item.get("role")
    if role == "assistant":
        parts = _read_parts(item.get("content"), f"{where}.content", "output_text")
        phase = item.get("phase")
        shown = {"phase": phase} if phase in ("commentary", "final_answer") else {}
        return {"status": _status(item), "role": role, **shown, "content": parts}
    if role not in INPUT_ROLES:
        refuse(
            "invalid_request",
            f"{where}.role",
            f"{where}.role is {quoted(role)}; allowed: {', '.join(INPUT_ROLES)}, assistant",
        )
    parts = _read_parts(item.get("content"), f"{where}.content", "input_text")
    return {"status": _status(item), "role": role, "content": parts}


def _read_parts(content: Any, where: str, kind: str) -> list[Item]:
    if isinstance(content, str):
        return [_text_part(content, kind)]
    if not isinstance(content, list):
        refuse(
            "invalid_request",
            where,
            f"{where} is {quoted(content)}; allowed: a string or a list of parts",
        )
    return [_read_part(part, f"{where}[{i}]", kind) for i, part in enumerate(content)]


def _read_part(part: Any, where: str, kind: str) -> Item:
    given = part.get("type") if isinstance(part, dict) else None
    if given == "refusal" and kind == "output_text":
        return {"type": "refusal", "refusal": _string(part, "refusal", where)}
    if given not in TEXT_PARTS:
        refuse(
            "unsupported_value",
            f"{where}.type",
            f"{where} has type {quoted(given)}; gpt-oss reads text only; allowed: {', '.join(TEXT_PARTS)}",
        )
    return _text_part(_string(part, "text", where), kind)


def _text_part(text: str, kind: str) -> Item:
    extra = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **extra}


def _read_reasoning(item: Item, where: str) -> Item:
    read: Item = {"summary": _read_texts(item, "summary", "summary_text", where)}
    if item.get("content"):
        read["content"] = _read_texts(item, "content", "reasoning_text", where)
    if item.get("encrypted_content") is not None:
        read["encrypted_content"] = _string(item, "encrypted_content", where)
    return read


def _read_texts(item: Item, field: str, kind: str, where: str) -> list[Item]:
    parts = item.get(field)
    if parts is not None and not isinstance(parts, list):
        refuse(
            "invalid_request",
            f"{where}.{field}",
            f"{where}.{field} is {quoted(parts)}; allowed: a list of parts of type {kind}",
        )
    texts = []
    for i, part in enumerate(parts or []):
        place = f"{where}.{field}[{i}]"
        if not isinstance(part, dict):
            refuse("invalid_request", place, f"{place} is {quoted(part)}; allowed: an object")
        texts.append({"type": kind, "text": _string(part, "text", place)})
    return texts


def _read_call(item: Item, where: str) -> Item:
    return {
        "status": _status(item),
        "call_id": _string(item, "call_id", where),
        "name": _string(item, "name", where),
        **({"namespace": item["namespace"]} if isinstance(item.get("namespace"), str) else {}),
        "arguments": _string(item, "arguments", where),
    }


def _read_output(item: Item, where: str) -> Item:
    output = item.get("output")
    if not isinstance(output, str):
        output = _read_parts(output, f"{where}.output", "input_text")
    return {
        "status": _status(item),
        "call_id": _string(item, "call_id", where),
        "output": output,
    }


def _status(item: Item) -> str:
    return "incomplete" if item.get("status") == "incomplete" else "completed"


def _string(item: Item, field: str, where: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        refuse(
            "invalid_request",
            f"{where}.{field}",
            f"{where}.{field} is {quoted(value)}; allowed: a string",
        )
    return value


_READERS: dict[str, Callable[[Item, str], Item]] = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_call,
    "function_call_output": _read_output,
}


def without_reasoning(item: Item) -> Item:
    """Return an item with nothing of what was thought in it."""
    if item.get("type") != "reasoning":
        return item
    return {**{k: v for k, v in item.items() if k != "content"}, "summary": []}
