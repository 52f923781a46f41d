"""Whatever stands where a form is asked for: a shape or a refusal, never anything else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.frontend.errors import RequestError
from rose.frontend.formatters.shape import AnswerShape
from rose.frontend.grammar.build import json_text
from rose.frontend.grammar.checker import Checker, Text
from rose.frontend.grammar.schema import ANNOTATIONS, ENFORCED, SchemaLimits
from rose.frontend.grammar.shape import answer_shape, is_free
from rose.frontend.parsing import parse_json

LIMITS = SchemaLimits(max_bytes=10_000)
WORDS = sorted({*ENFORCED, *ANNOTATIONS, "not", "nullable", "uniqueItems", "$id", "x"})
NAMES = st.one_of(st.sampled_from(WORDS), st.text(max_size=4))
NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.floats(),
    st.sampled_from([1e308, -1e308, 2**63, 2**200, 1e-320, -0.0]),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.text(max_size=6),
    st.sampled_from(
        ["object", "string", "array", "integer", "#", "#/$defs/x", "#/x/0", "date", "["]
    ),
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=20,
)
SCHEMAS = st.dictionaries(NAMES, JSON, max_size=5)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(["f", "g"])},
                optional={"strict": st.booleans(), "parameters": SCHEMAS},
            ),
        }
    ),
    max_size=2,
)
CHOICES = st.one_of(
    st.sampled_from([None, "none", "auto", "required"]),
    st.fixed_dictionaries({"type": st.sampled_from(["function", "allowed_tools"])}, optional={
        "function": JSON, "allowed_tools": JSON, "tools": JSON, "mode": JSON, "name": JSON,
    }),
    JSON,
)  # fmt: skip
FORMATS = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema"])},
        optional={"json_schema": st.one_of(JSON, st.fixed_dictionaries({"schema": SCHEMAS}))},
    ),
    JSON,
)


@pytest.fixture(scope="module")
def checker():
    checker = Checker(num_processes=1, seconds=20)
    yield checker
    checker.close()


@given(tools=TOOLS, tool_choice=CHOICES, answer_format=FORMATS)
@settings(max_examples=400, deadline=None)
def test_a_shape_or_a_refusal(checker, tools, tool_choice, answer_format):
    body = {"tools": tools, "tool_choice": tool_choice, "answer_format": answer_format}
    try:
        body = parse_json(json.dumps(body).encode("utf-8", "surrogatepass"))
    except RequestError:
        return
    try:
        free = is_free(**body)
        shape = answer_shape(**body, format_param="response_format", limits=LIMITS)
    except RequestError as error:
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert refusal.kind.status == 400
        assert refusal.param
        assert len(refusal.message) < 3000
        return
    assert isinstance(shape, AnswerShape)
    assert free == shape.is_free
    schemas = [shape.content, *(f.arguments for f in shape.functions)]
    texts = [Text("schema", json_text(schema)) for schema in schemas if schema is not None]
    if texts:
        assert all(p is None or p for p in checker.problems(texts))
