"""Schemas: what is enforced passes, what is not is refused by name, and what passes is obeyed."""

from __future__ import annotations

import time

import pytest

from rose.frontend.errors import RequestError
from rose.frontend.grammar.build import json_text
from rose.frontend.grammar.checker import Checker, Text
from rose.frontend.grammar.schema import MAX_DEPTH, SchemaLimits, checked_schema

LIMITS = SchemaLimits(max_bytes=4096)

UNSUPPORTED = {
    "not": {"type": "string"},
    "if": {"type": "string"},
    "uniqueItems": True,
    "contains": {"type": "string"},
    "minContains": 1,
    "propertyNames": {"pattern": "^a"},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "unevaluatedProperties": False,
    "unevaluatedItems": False,
    "$dynamicRef": "#a",
    "$anchor": "a",
    "nullable": True,
    "additionalItems": False,
    "contentEncoding": "base64",
    "x-guidance": {"lenient": True},
    "maxLenght": 3,
}
WRONG = [
    [],
    {"type": "text"},
    {"type": []},
    {"minLength": -1},
    {"minLength": 1.5},
    {"maxItems": "3"},
    {"minimum": "3"},
    {"exclusiveMinimum": True},
    {"multipleOf": 0},
    {"minimum": 2**53 + 1},
    {"exclusiveMaximum": -1e300},
    {"required": "a"},
    {"required": [1]},
    {"enum": []},
    {"enum": "a"},
    {"anyOf": []},
    {"oneOf": {}},
    {"items": [{"type": "string"}]},
    {"properties": []},
    {"properties": {"a": 3}},
    {"pattern": 3},
    {"format": "credit-card"},
    {"$ref": "http://other.example/schema"},
    {"$ref": "#/$defs/missing"},
    {"$ref": "#"},
    {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}},
        "$ref": "#/$defs/a",
    },
]


@pytest.fixture(scope="module")
def problem():
    """Return a function from a schema to the library's complaint."""
    checker = Checker(num_processes=1, seconds=20)
    yield lambda schema: checker.problems([Text("schema", json_text(schema))])[0]
    checker.close()


def _check(schema):
    return checked_schema(schema, "response_format.schema", LIMITS)


@pytest.mark.parametrize("keyword", UNSUPPORTED)
@pytest.mark.parametrize("is_deep", [False, True])
def test_a_keyword_that_is_not_enforced_is_refused_by_name(keyword, is_deep):
    schema = {keyword: UNSUPPORTED[keyword]}
    if is_deep:
        schema = {"properties": {"a": {"anyOf": [{"type": "null"}, schema]}}}
    with pytest.raises(RequestError) as caught:
        _check(schema)
    assert caught.value.code == "unsupported_value"
    assert caught.value.param == "response_format.schema"
    assert f"keyword {keyword!r}" in caught.value.message
    if is_deep:
        assert "#/properties/a/anyOf/1" in caught.value.message


def test_references_with_more_ways_than_anyone_can_go_take_no_time():
    count = 40  # each of two references leads to two more
    defs = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(count)
    }
    names = sorted(defs, key=lambda name: -int(name[1:]))
    ordered = {f"d{count}": {"type": "string"}, **{name: defs[name] for name in names}}
    begin = time.monotonic()
    _check({"$ref": "#/$defs/d0", "$defs": ordered})
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("schema", WRONG, ids=str)
def test_a_schema_that_is_none_is_refused(schema):
    with pytest.raises(RequestError) as caught:
        _check(schema)
    assert caught.value.code == "invalid_request"
    assert "allowed" in caught.value.message or "refers to itself" in caught.value.message


def test_annotations_and_what_asks_for_nothing_are_left_out():
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/a",
        "title": "A",
        "type": "object",
        "properties": {
            "title": {"type": "string", "description": "d", "default": "x", "examples": ["y"]},
            "ids": {"type": "array", "uniqueItems": False, "items": True},
        },
        "required": ["title"],
    }
    assert _check(schema) == {
        "type": "object",
        "properties": {"title": {"type": "string"}, "ids": {"type": "array", "items": True}},
        "required": ["title"],
    }


def test_what_a_pydantic_model_writes_passes(problem):
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=10)
        born: int | None = None

    class Work(pydantic.BaseModel):
        title: str
        people: list[Person]
        scores: dict[str, float]

    assert problem(_check(Work.model_json_schema())) is None


def test_depth_and_size_are_limited(problem):
    schema = {"type": "null"}
    for _ in range(MAX_DEPTH - 1):
        schema = {"items": schema}
    assert problem(_check(schema)) is None
    with pytest.raises(RequestError, match=f"more than {MAX_DEPTH} levels"):
        _check({"items": schema})
    deep = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="levels"):
        _check(deep)
    with pytest.raises(RequestError, match=r"has \d+ bytes as JSON; allowed: 4096"):
        _check({"enum": ["x" * 5000]})
    with pytest.raises(RequestError, match="more than 5000 schemas"):
        checked_schema({"enum": list(range(6000))}, "p", SchemaLimits(max_bytes=10**6))


def test_recursion_through_values_is_fine(problem):
    tree = {
        "type": "object",
        "properties": {"left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["left"],
        "additionalProperties": False,
    }
    assert _check(tree) == tree
    assert problem(tree) is None
