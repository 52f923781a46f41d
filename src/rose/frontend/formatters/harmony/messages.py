"""Harmony's own view of a conversation: messages, and the texts of its system and developer messages.

Plain data and text; knows neither tokens nor request bodies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rose.frontend.formatters.harmony.schema_types import compact_json, type_text

FUNCTIONS = "functions"
IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
CUTOFF = "2024-06"
CHANNELS = ("analysis", "commentary", "final")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One function; `parameters` is a JSON schema, None when it takes none."""

    name: str
    description: str = ""
    parameters: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Tools under one name; the description is shown as comments, or as plain text when there are no tools."""

    name: str
    description: str | None = None
    tools: Sequence[Tool] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """The shape that the final answer shall have."""

    name: str
    schema: Any
    description: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemContent:
    """The first message; None or empty leaves a line out."""

    identity: str | None = IDENTITY
    cutoff: str | None = CUTOFF
    date: str | None = None
    effort: str | None = "medium"
    channels: Sequence[str] = CHANNELS
    is_channel_required: bool = True
    namespaces: Sequence[Namespace] = ()

    def text(self, *, has_functions: bool) -> str:
        """Return the message; `has_functions`: the conversation offers functions."""
        top = [self.identity] if self.identity is not None else []
        top += [f"Knowledge cutoff: {self.cutoff}"] if self.cutoff is not None else []
        top += [f"Current date: {self.date}"] if self.date is not None else []
        sections = ["\n".join(top)] if top else []
        sections += [f"Reasoning: {self.effort}"] if self.effort is not None else []
        sections += [_tools_text(self.namespaces)] if self.namespaces else []
        sections += [self._channels_text(has_functions)] if self.channels else []
        return "\n\n".join(sections)

    def _channels_text(self, has_functions: bool) -> str:
        line = f"# Valid channels: {', '.join(self.channels)}."
        if self.is_channel_required:
            line += " Channel must be included for every message."
        if has_functions:
            line += f"\nCalls to these tools must go to the commentary channel: '{FUNCTIONS}'."
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class DeveloperContent:
    """What the maker of an application tells the model: instructions, tools, the shape of answers."""

    instructions: str | None = None
    namespaces: Sequence[Namespace] = ()
    response_format: ResponseFormat | None = None

    def text(self) -> str:
        """Return the message."""
        sections = []
        if self.instructions is not None:
            sections += ["# Instructions", self.instructions]
        if self.namespaces:
            sections.append(_tools_text(self.namespaces))
        if self.response_format is not None:
            sections.append(_format_text(self.response_format))
        return "\n\n".join(sections)

    @property
    def has_functions(self) -> bool:
        """Return whether functions are offered here."""
        return any(n.name == FUNCTIONS and n.tools for n in self.namespaces)


Content = str | SystemContent | DeveloperContent


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message; a tool's message has the tool as `name`."""

    role: str
    content: Sequence[Content] = field(default_factory=tuple)
    name: str | None = None
    recipient: str | None = None
    channel: str | None = None
    content_type: str | None = None
    token_ids: Sequence[int] = ()
    """What the model sampled for this message after its role, to be repeated as it is; empty: it is rendered."""


def has_functions(messages: Iterable[Message]) -> bool:
    """Return whether any developer message offers functions."""
    contents = (content for message in messages for content in message.content)
    return any(isinstance(c, DeveloperContent) and c.has_functions for c in contents)


def drop_finished_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Leave out what was written on the analysis channel in turns that ended in a final message.

    Reasoning after the last final message stays: its turn still waits for a tool's result.
    """
    finals = [i for i, m in enumerate(messages) if m.role == "assistant" and m.channel == "final"]
    last_final = finals[-1] if finals else -1
    return [m for i, m in enumerate(messages) if m.channel != "analysis" or i > last_final]


def _tools_text(namespaces: Sequence[Namespace]) -> str:
    ordered = sorted(namespaces, key=lambda namespace: namespace.name)
    return "\n\n".join(["# Tools", *map(_namespace_text, ordered)])


def _namespace_text(namespace: Namespace) -> str:
    lines = [f"## {namespace.name}", ""]
    mark = "// " if namespace.tools else ""
    lines += [mark + line for line in _lines(namespace.description or "")]
    if namespace.tools:
        lines += [f"namespace {namespace.name} {{", ""]
        for tool in namespace.tools:
            lines += [*_tool_lines(tool), ""]
        lines.append(f"}} // namespace {namespace.name}")
    return "\n".join(lines)


def _tool_lines(tool: Tool) -> list[str]:
    argument = "" if tool.parameters is None else f"_: {type_text(tool.parameters)}"
    return [
        *(f"// {line}" for line in _lines(tool.description)),
        f"type {tool.name} = ({argument}) => any;",
    ]


def _format_text(response_format: ResponseFormat) -> str:
    lines = ["# Response Formats", "", f"## {response_format.name}", ""]
    lines += [f"// {line}" for line in _lines(response_format.description or "")]
    return "\n".join([*lines, compact_json(response_format.schema)])


def _lines(text: str) -> list[str]:
    """Split at line feeds only, a last empty line left out (str.splitlines knows more separators)."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if text.endswith("\n") or not text else lines
