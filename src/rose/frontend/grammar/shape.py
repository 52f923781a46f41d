"""Request bodies of either API -> the shape that the answer is held to.

`answer_shape` reads the fields as both APIs write them: functions nested (chat) or flat (Responses), a response format
nested or flat. It refuses what cannot be enforced, so whatever it returns is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from rose.frontend.errors import RequestError
from rose.frontend.formatters.shape import ANY_OBJECT, AnswerShape, FunctionShape, JsonSchema
from rose.frontend.grammar.schema import SchemaLimits, checked_schema
from rose.frontend.parsing import quoted

MAX_FUNCTIONS = 128
"""As OpenAI allows; where calls are held to a form each is a branch of the grammar."""
CHOICES = "none, auto, required, a function, or allowed_tools"
_NO_ARGUMENTS: JsonSchema = {"type": "object", "properties": {}, "additionalProperties": False}
_FORMAT_FIELDS = frozenset({"type", "name", "description", "schema", "strict"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What `tool_choice` says."""

    mode: Literal["none", "auto", "required"]
    names: frozenset[str] | None = None
    """The functions that may be called; None: all."""


def is_free(*, tools: list[Any] | None, tool_choice: Any, answer_format: Any) -> bool:
    """Tell, without a look into any schema, whether a request asks for no form at all.

    Raises  RequestError for a `tool_choice` that does not fit the tools
    """
    is_text = isinstance(answer_format, dict) and answer_format.get("type") == "text"
    if answer_format is not None and not is_text:
        return False
    choice = read_choice(tool_choice, _names(tools or []))
    if choice.mode == "none":
        return True
    is_strict = any(_fields(tool).get("strict") for tool in tools or [])
    return choice.mode == "auto" and choice.names is None and not is_strict


def answer_shape(
    *,
    tools: list[Any] | None,
    tool_choice: Any,
    answer_format: Any,
    format_param: str,
    limits: SchemaLimits,
) -> AnswerShape:
    """Return the shape of an answer.

    Units    answer_format: `response_format` of chat, `text.format` of Responses; format_param is its name in errors
    Raises   RequestError for what is wrong, or cannot be enforced, naming the field and the keyword
    """
    choice = read_choice(tool_choice, _names(tools or []))
    content = _content_schema(answer_format, format_param, limits)
    if choice.mode == "none":
        return AnswerShape(content=content)
    must_call = choice.mode == "required"
    functions = tuple(
        _function(tool, f"tools[{i}]", limits, must_call=must_call)
        for i, tool in enumerate(tools or [])
        if choice.names is None or _name(tool) in choice.names
    )
    shape = AnswerShape(
        content=content,
        functions=functions,
        must_call=must_call,
        is_limited=choice.names is not None,
    )
    if not shape.is_free and len(functions) > MAX_FUNCTIONS:
        _refuse("tools", f"tools has {len(functions)} functions; allowed: {MAX_FUNCTIONS}")
    return shape


def read_choice(value: Any, names: list[str]) -> Choice:
    """Return what a `tool_choice` says of functions with these names.

    Raises  RequestError
    """
    if value in (None, "none", "auto") and isinstance(value, str | None):
        return Choice(mode=value or "auto")
    if not names:
        _refuse(
            "tool_choice",
            f"tool_choice={quoted(value)} was given without tools; allowed then: none; give tools or leave it out",
        )
    if value == "required":
        return Choice(mode="required")
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        return Choice(mode="required", names=_known([value], names, value))
    if kind == "allowed_tools":
        nested = value.get("allowed_tools", value)
        mode = nested.get("mode", "auto") if isinstance(nested, dict) else None
        listed = nested.get("tools") if isinstance(nested, dict) else None
        if mode in ("auto", "required") and isinstance(listed, list) and listed:
            return Choice(mode=mode, names=_known(listed, names, value))
    raise RequestError(
        "invalid_request",
        f"tool_choice={quoted(value)}; allowed: {CHOICES}",
        param="tool_choice",
    )


def _known(entries: list[Any], names: list[str], value: Any) -> frozenset[str]:
    chosen = [_name(e) if _is_function(e) else None for e in entries]
    if None in chosen or not set(chosen) <= set(names):
        shown = ", ".join(names[:16])
        _refuse(
            "tool_choice",
            f"tool_choice={quoted(value)}; allowed: functions of tools ({shown}); change tool_choice or tools",
        )
    return frozenset(name for name in chosen if name is not None)


def _is_function(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("type") == "function"


def _fields(tool: Any) -> dict[str, Any]:
    nested = tool.get("function") if isinstance(tool, dict) else None
    return nested if isinstance(nested, dict) else tool if isinstance(tool, dict) else {}


def _name(tool: Any) -> str | None:
    name = _fields(tool).get("name")
    return name if isinstance(name, str) else None


def _names(tools: list[Any]) -> list[str]:
    return [name for tool in tools if (name := _name(tool)) is not None]


def _function(tool: Any, where: str, limits: SchemaLimits, *, must_call: bool) -> FunctionShape:
    """Return what a function's arguments are held to: with `strict` their schema, or the request is refused.

    Without it a call that must come is held to the schema where that can be enforced, to any JSON object otherwise.
    """
    fields = _fields(tool)
    name, parameters = fields.get("name"), fields.get("parameters")
    if not isinstance(name, str):
        _refuse(f"{where}.name", f"{where}.name is {quoted(name)}; allowed: a string")
    nested = "function." if isinstance(tool, dict) and "function" in tool else ""
    param = f"{where}.{nested}parameters"
    if fields.get("strict"):
        schema = _NO_ARGUMENTS if parameters is None else parameters
        checked = checked_schema(schema, param, limits)
        return FunctionShape(name=name, arguments=_objects_only(checked, param))
    if not must_call:
        return FunctionShape(name=name, arguments=None)
    best = _best(parameters, param, limits)
    return FunctionShape(name=name, arguments=best, is_best_effort=True)


def _best(parameters: Any, param: str, limits: SchemaLimits) -> JsonSchema:
    if parameters is None:
        return ANY_OBJECT
    try:
        return _objects_only(checked_schema(parameters, param, limits), param)
    except RequestError:
        return ANY_OBJECT  # nobody asked for more than a call


def _objects_only(schema: JsonSchema, param: str) -> JsonSchema:
    """Return a schema of arguments, which are always an object."""
    if schema.get("type", "object") != "object":
        _refuse(param, f"{param} has type {quoted(schema['type'])}; allowed: object")
    return {"type": "object", **schema}


def _content_schema(value: Any, param: str, limits: SchemaLimits) -> JsonSchema | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        _refuse(param, f"{param}={quoted(value)}; allowed types: text, json_object, json_schema")
    fields = value.get("json_schema", value)
    path = f"{param}.json_schema" if "json_schema" in value else param
    if not isinstance(fields, dict):
        _refuse(path, f"{path}={quoted(fields)}; allowed: an object with name and schema")
    unknown = sorted(set(fields) - _FORMAT_FIELDS)
    if unknown:
        known = ", ".join(sorted(_FORMAT_FIELDS))
        _refuse(path, f"{path} has {quoted(unknown[0])}; allowed: {known}; leave it out")
    if fields.get("schema") is None:
        _refuse(f"{path}.schema", f"{path}.schema is missing; give the JSON schema")
    return checked_schema(fields["schema"], f"{path}.schema", limits)


def _refuse(param: str, message: str) -> NoReturn:
    raise RequestError("invalid_request", message, param=param)
