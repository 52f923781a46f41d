"""Whether a JSON schema can be enforced, told before anything is generated: what cannot is refused by name.

An unknown keyword means nothing in JSON Schema, and that is why it is refused here: a client that misspells `maxLength`
should hear of it, not find out in its data. What a keyword means is the grammar library's business; docs/grammars.md
says what it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import unquote

import msgspec

from rose.frontend.errors import RequestError
from rose.frontend.formatters.shape import JsonSchema
from rose.frontend.grammar.dates import PATTERNS
from rose.frontend.parsing import quoted

MAX_DEPTH = 32
"""Levels of schemas inside schemas; the grammar library reads 128 levels of JSON, two or three to each."""
MAX_NODES = 5000
"""Schemas in a schema, enum values included, as OpenAI allows properties and enum values."""

_FOR_PEOPLE = ("title", "description", "default", "examples", "$comment")
ANNOTATIONS = frozenset((*_FOR_PEOPLE, "$schema", "deprecated", "readOnly", "writeOnly"))
"""Say nothing about what is valid."""
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
FORMATS = (*FORMATS, "uri")
TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
MAX_BOUND = 2**53
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SCHEMA = ("items", "additionalProperties")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_OTHERS = ("type", "enum", "const", "required", "pattern", "format", "$ref")
ENFORCED = frozenset((*_COUNTS, *_BOUNDS, *_SCHEMA, *_SCHEMA_LISTS, *_SCHEMA_MAPS, *_OTHERS))
_ASKS_NOTHING = {"uniqueItems": False, "nullable": False, "contentMediaType": None}
"""Keyword -> the value that changes nothing; dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaLimits:
    """How large a schema may be."""

    max_bytes: int


def checked_schema(schema: Any, param: str, limits: SchemaLimits) -> JsonSchema:
    """Return a schema with nothing in it that is not enforced, annotations aside.

    Raises  RequestError that names the keyword and the place in the schema
    """
    num_bytes = len(_encoded(schema, param))
    if num_bytes > limits.max_bytes:
        raise RequestError(
            "invalid_request",
            f"{param} has {num_bytes} bytes as JSON; allowed: {limits.max_bytes}; make the schema smaller or have "
            "the server started with a larger --max-schema-bytes",
            param=param,
        )
    if not isinstance(schema, dict):
        raise RequestError(
            "invalid_request", f"{param} is {quoted(schema)}; allowed: an object", param=param
        )
    checked = _Check(param).schema(schema, "", depth=1)
    _refuse_endless(checked, param)
    return checked


def _encoded(schema: Any, param: str) -> bytes:
    try:
        return msgspec.json.encode(schema)
    except RecursionError:
        raise _too_deep(param) from None


def _too_deep(param: str) -> RequestError:
    return RequestError(
        "invalid_request",
        f"{param} has more than {MAX_DEPTH} levels of schemas inside schemas; allowed: {MAX_DEPTH}; "
        "use $defs and $ref or make it flatter",
        param=param,
    )


class _Check:
    """One walk over one schema."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._num_nodes = 0

    def schema(self, schema: Any, place: str, *, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._wrong(place, f"is {quoted(schema)}", "an object, true or false")
        if depth > MAX_DEPTH:
            raise _too_deep(self._param)
        self._count(1)
        kept = {}
        for keyword, value in schema.items():
            where = f"{place}/{keyword}"
            if keyword in ANNOTATIONS or self._asks_nothing(keyword, value):
                continue
            if keyword == "$id" and not place:
                continue  # names the whole schema; references to it by name are refused
            if keyword not in ENFORCED:
                self._refuse(keyword, value, place)
            kept[keyword] = self._value(keyword, value, where, depth)
        return _with_exact_dates(kept)

    def _value(self, keyword: str, value: Any, where: str, depth: int) -> Any:
        if keyword in _SCHEMA:
            return self.schema(value, where, depth=depth + 1)
        if keyword in _SCHEMA_LISTS:
            if not isinstance(value, list) or not value:
                self._wrong(where, f"is {quoted(value)}", "a list of schemas with at least one")
            return [self.schema(v, f"{where}/{i}", depth=depth + 1) for i, v in enumerate(value)]
        if keyword in _SCHEMA_MAPS:
            if not isinstance(value, dict):
                self._wrong(where, f"is {quoted(value)}", "an object of schemas")
            return {
                name: self.schema(v, f"{where}/{name}", depth=depth + 1)
                for name, v in value.items()
            }
        for problem, allowed in _problems(keyword, value):
            self._wrong(where, problem, allowed)
        if keyword == "enum":
            self._count(len(value))
        return value

    @staticmethod
    def _asks_nothing(keyword: str, value: Any) -> bool:
        return keyword in _ASKS_NOTHING and (value is None or value is _ASKS_NOTHING[keyword])

    def _count(self, number: int) -> None:
        self._num_nodes += number
        if self._num_nodes > MAX_NODES:
            raise RequestError(
                "invalid_request",
                f"{self._param} has more than {MAX_NODES} schemas and enum values; allowed: {MAX_NODES}; "
                "make it smaller",
                param=self._param,
            )

    def _wrong(self, where: str, found: str, allowed: str) -> NoReturn:
        raise RequestError(
            "invalid_request",
            f"{self._param}: #{where[:200]} {found}; allowed: {allowed}",
            param=self._param,
        )

    def _refuse(self, keyword: str, value: Any, place: str) -> NoReturn:
        raise RequestError(
            "unsupported_value",
            f"{self._param}: keyword {quoted(keyword)} at #{place[:200]} (value {quoted(value)}) cannot be enforced; "
            f"enforced keywords: {', '.join(sorted(ENFORCED))}; leave it out and check the answer yourself",
            param=self._param,
        )


def _problems(keyword: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the value of a keyword that holds no schemas: found, allowed."""
    found = f"is {quoted(value)}"
    if keyword == "type":
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(n, str) and n in TYPES for n in names):
            yield found, f"one of {', '.join(TYPES)}, or a list of them"
    elif keyword in _COUNTS:
        if not _is_number(value) or value != int(value) or not 0 <= value < 2**31:
            yield found, "a whole number from 0"
    elif keyword in _BOUNDS:
        if _is_number(value) and abs(value) > MAX_BOUND:
            # the library keeps numbers as doubles, so that a larger bound would be off by one
            yield found, f"-{MAX_BOUND} to {MAX_BOUND}"
        elif not _is_number(value) or (keyword == "multipleOf" and value <= 0):
            yield found, "a number above 0" if keyword == "multipleOf" else "a number"
    elif keyword == "required":
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            yield found, "a list of names"
    elif keyword == "enum":
        if not isinstance(value, list) or not value:
            yield found, "a list of values with at least one"
    elif keyword == "$ref":
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            yield found, "a reference inside the schema, such as #/$defs/item"
    elif keyword == "pattern":
        if not isinstance(value, str):
            yield found, "a regular expression as a string"
    elif keyword == "format" and value not in FORMATS:
        yield found, f"formats that can be enforced: {', '.join(FORMATS)}"


def _refuse_endless(schema: JsonSchema, param: str) -> None:
    """Refuse references that lead back to themselves with nothing in between: no value is ever reached.

    Raises  RequestError, also for a reference to a place that does not exist
    """
    done: set[str] = set()
    for start in _references(schema):
        # Each place is followed once: there may be more ways than anyone can go.
        way = {} if start in done else {start: _followed(_target(schema, start, param))}
        while way:
            reference, rest = next(reversed(way.items()))
            following = next(rest, None)
            if following is None:
                del way[reference]
                done.add(reference)
            elif following in way:
                raise RequestError(
                    "invalid_request",
                    f"{param}: {quoted(following)} refers to itself and to nothing else; give it a type",
                    param=param,
                )
            elif following not in done:
                way[following] = _followed(_target(schema, following, param))


def _references(schema: Any) -> Iterator[str]:
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
            pending += node.values()
        elif isinstance(node, list):
            pending += node


def _followed(schema: Any) -> Iterator[str]:
    """Yield the references that stand for the schema itself, not for a part of its values."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for part in schema.get("allOf", ()):
            yield from _followed(part)


def _target(schema: Any, reference: str, param: str) -> Any:
    node = schema
    for name in reference.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            raise RequestError(
                "invalid_request",
                f"{param}: $ref {quoted(reference)} leads nowhere; allowed: a place in the schema; correct it",
                param=param,
            )
    return node


def _with_exact_dates(schema: JsonSchema) -> JsonSchema:
    """Return a schema with a pattern in place of a format whose own grammar allows too much."""
    pattern = PATTERNS.get(schema["format"]) if "format" in schema else None
    if pattern is None:
        return schema
    rest = {name: value for name, value in schema.items() if name != "format"}
    if "pattern" not in rest:
        return {**rest, "pattern": pattern}
    return {**rest, "allOf": [*rest.get("allOf", ()), {"pattern": pattern}]}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
