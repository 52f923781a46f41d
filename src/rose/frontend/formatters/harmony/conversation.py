"""Request bodies of chat completions and Responses to Harmony messages.

What both APIs share lives here: the system and developer messages, tools, content parts, and the errors, each of
which names the field of the body. `chat_body.py` and `responses_body.py` read what differs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rose.frontend.formatters.base import FormatError
from rose.frontend.formatters.harmony.messages import (
    FUNCTIONS,
    DeveloperContent,
    Message,
    Namespace,
    ResponseFormat,
    SystemContent,
    Tool,
)
from rose.frontend.formatters.harmony.tokens import CONSTRAIN_NAME

EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""Effort as clients ask for it, and the nearest that the model knows."""
RESERVED_NAMESPACES = (FUNCTIONS, "browser", "python", "container", "assistant")
"""Names that mean something else as the first word of a recipient."""
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_NAME = re.compile(r"[^\s<>|]{1,256}")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A request body as Harmony sees it."""

    messages: list[Message]
    """All of them, reasoning of finished turns included."""
    function_names: list[str]


def assemble(
    body: dict[str, Any],
    history: Sequence[Message],
    *,
    effort: Any,
    tools: Sequence[Tool],
    response_format: ResponseFormat | None,
    namespaces: Sequence[Namespace] = (),
) -> Conversation:
    """Put the system message and the first developer message before what was said.

    Developer messages at the head of `history` become one with the tools; `namespaces` has those that are no
    functions by themselves.
    """
    num_leading = next((i for i, m in enumerate(history) if m.role != "developer"), len(history))
    leading = [instructions_of(message) for message in history[:num_leading]]
    leading = [text for text in leading if text]
    developer = DeveloperContent(
        instructions="\n\n".join(leading) or None,
        namespaces=(*((Namespace(name=FUNCTIONS, tools=tools),) if tools else ()), *namespaces),
        response_format=response_format,
    )
    where = "reasoning.effort" if body.get("api") == "responses" else "reasoning_effort"
    system = SystemContent(effort=resolve_effort(effort, where), date=_date(body))
    messages = [Message(role="system", content=(system,))]
    if developer != DeveloperContent():
        messages.append(Message(role="developer", content=(developer,)))
    names = [tool.name for tool in tools]
    names += [f"{n.name}.{tool.name}" for n in namespaces for tool in n.tools]
    return Conversation(messages=[*messages, *history[num_leading:]], function_names=names)


def resolve_effort(asked: Any, where: str = "reasoning_effort") -> str:
    """Return the effort that the model is told: low, medium or high; None asks for medium."""
    if asked is None:
        return "medium"
    if not isinstance(asked, str) or asked not in EFFORTS:
        raise problem(where, asked, f"one of {', '.join(EFFORTS)}")
    return EFFORTS[asked]


def read_tools(body: dict[str, Any]) -> list[Tool]:
    """Return the functions that the model may call, as `tools` and `tool_choice` say."""
    listed = body.get("tools")
    if listed is not None and not isinstance(listed, list):
        raise problem("tools", listed, "a list of functions")
    tools = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(listed or [])]
    allowed = _allowed_names(body.get("tool_choice"), tools)
    return [tool for tool in tools if allowed is None or tool.name in allowed]


def read_namespaces(body: dict[str, Any]) -> list[Namespace]:
    """Return the functions that stand under names of their own: `namespaces` of a body, each with name and tools, and
    its place in `tools`."""
    found = []
    for fields in body.get("namespaces") or []:
        where = f"tools[{fields['place']}]"
        name = read_name(fields.get("name"), f"{where}.name")
        if "." in name or name in RESERVED_NAMESPACES:
            reserved = ", ".join(RESERVED_NAMESPACES)
            raise problem(f"{where}.name", name, f"a name without dots that is none of {reserved}")
        tools = [_read_tool(t, f"{where}.tools[{k}]") for k, t in enumerate(fields["tools"])]
        found.append(Namespace(name=name, description=fields.get("description"), tools=tools))
    return found


def _read_tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, dict):
        raise problem(where, tool, 'an object such as {"type": "function", ...}')
    if tool.get("type", "function") != "function":
        raise problem(f"{where}.type", tool.get("type"), "function")
    nested = tool.get("function")
    fields, where = (nested, f"{where}.function") if isinstance(nested, dict) else (tool, where)
    description, parameters = fields.get("description"), fields.get("parameters")
    if description is not None and not isinstance(description, str):
        raise problem(f"{where}.description", description, "a string")
    if parameters is not None and not isinstance(parameters, dict):
        raise problem(f"{where}.parameters", parameters, "a JSON schema (an object)")
    name = read_name(fields.get("name"), f"{where}.name")
    return Tool(name=name, description=description or "", parameters=parameters)


def _allowed_names(choice: Any, tools: Sequence[Tool]) -> set[str] | None:
    """Return the names that tool_choice leaves; None leaves all."""
    if choice in (None, "auto"):
        return None
    if choice == "none":
        return set()
    if not tools:
        raise problem("tool_choice", choice, "none or auto where tools is empty")
    if choice == "required":
        return None
    names = _chosen_names(choice)
    known = {tool.name for tool in tools}
    if names is None or not names <= known:
        allowed = f"none, auto, required, or a function among {', '.join(sorted(known))}"
        raise problem("tool_choice", choice, allowed)
    # A single chosen function does not hide the others: what the model sees stays the same from turn to turn.
    return names if choice.get("type") == "allowed_tools" else None


def _chosen_names(choice: Any) -> set[str] | None:
    if not isinstance(choice, dict):
        return None
    if choice.get("type") == "allowed_tools":
        listed = choice.get("allowed_tools", choice)
        listed = listed.get("tools") if isinstance(listed, dict) else None
    else:
        listed = [choice]
    names = [_chosen_name(entry) for entry in listed] if isinstance(listed, list) else [None]
    return None if None in names else {str(name) for name in names}


def _chosen_name(entry: Any) -> str | None:
    if not isinstance(entry, dict) or entry.get("type") != "function":
        return None
    nested = entry.get("function")
    name = nested.get("name") if isinstance(nested, dict) else entry.get("name")
    return name if isinstance(name, str) else None


def read_response_format(value: Any, where: str) -> ResponseFormat | None:
    """Return the schema that the answer shall follow; plain text and json_object have none."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else value
    if kind in ("text", "json_object"):
        return None
    fields = value.get("json_schema", value) if kind == "json_schema" else None
    if not isinstance(fields, dict) or not isinstance(fields.get("schema"), dict):
        raise problem(where, value, "type text, json_object, or json_schema with name and schema")
    description = fields.get("description")
    return ResponseFormat(
        name=read_name(fields.get("name"), f"{where}.name"),
        schema=fields["schema"],
        description=description if isinstance(description, str) else None,
    )


def read_text(content: Any, where: str) -> tuple[str, ...]:
    """Return the texts of a message's content: a string, or a list of text parts."""
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list):
        raise problem(where, content, "a string or a list of text parts")
    return tuple(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    text = part.get(field) if field else None
    if not isinstance(text, str):
        raise problem(f"{where}.type", kind or part, f"text parts ({', '.join(_TEXT_PARTS)})")
    return text


def read_name(name: Any, where: str) -> str:
    """Return a name that fits in a header: no blanks, no angle brackets, no bars."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise problem(where, name, "1 to 256 characters without blanks, <, > and |")
    return name


def call_message(name: str, arguments: str, *, namespace: str = FUNCTIONS) -> Message:
    """Return the message by which the model called a function."""
    return Message(
        role="assistant",
        recipient=f"{namespace}.{name}",
        channel="commentary",
        content_type=f"{CONSTRAIN_NAME}json",
        content=(arguments,),
    )


def result_message(name: str, texts: tuple[str, ...], *, namespace: str = FUNCTIONS) -> Message:
    """Return the message by which a function answered."""
    return Message(
        role="tool",
        name=f"{namespace}.{name}",
        recipient="assistant",
        channel="commentary",
        content=texts,
    )


def developer_message(texts: tuple[str, ...]) -> Message:
    """Return a later system or developer message of the body."""
    return Message(role="developer", content=(DeveloperContent(instructions="".join(texts)),))


def instructions_of(message: Message) -> str:
    """Return the instructions of a message made by `developer_message`."""
    content = message.content[0]
    assert isinstance(content, DeveloperContent), "developer messages of a body hold instructions"
    return content.instructions or ""


def problem(where: str, found: Any, allowed: str) -> FormatError:
    """Return the error for one field of the body."""
    shown = repr(found)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return FormatError(f"{where}: found {shown}; allowed: {allowed}; change {where}", param=where)


def _date(body: dict[str, Any]) -> str | None:
    date = body.get("conversation_date")
    if date is not None and not (isinstance(date, str) and _DATE.fullmatch(date)):
        raise problem("conversation_date", date, "a day as YYYY-MM-DD")
    return date
