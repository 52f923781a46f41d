"""Every keyword that is let through is obeyed: by single values, and by random walks along the grammar."""

from __future__ import annotations

import datetime
import json
import random

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from rose.frontend.formatters.harmony.rules import JSON_STYLE
from rose.frontend.grammar.schema import ENFORCED, FORMATS, SchemaLimits, checked_schema

END = 256
NUM, TEXT = {"type": "number"}, {"type": "string"}
ONE = {"properties": {"a": {"type": "null"}}, "type": "object"}

# keyword -> schema, a value that it allows, one that only this keyword forbids
CASES = {
    "type": ({"type": "integer"}, 3, "x"),
    "enum": ({"enum": [1, "a", {"b": [None]}]}, {"b": [None]}, 2),
    "const": ({"const": ["x", 1.5]}, ["x", 1.5], ["x", 2]),
    "minLength": ({**TEXT, "minLength": 2}, "ab", "a"),
    "maxLength": ({**TEXT, "maxLength": 2}, "ab", "abc"),
    "pattern": ({**TEXT, "pattern": "^[a-c]+-?$"}, "abc-", "xyz"),
    "format": ({**TEXT, "format": "date"}, "2024-02-29", "yesterday"),
    "minimum": ({**NUM, "minimum": 3}, 3, 2),
    "maximum": ({**NUM, "maximum": 3}, 3, 3.5),
    "exclusiveMinimum": ({**NUM, "exclusiveMinimum": 3}, 3.5, 3),
    "exclusiveMaximum": ({**NUM, "exclusiveMaximum": 3}, 2, 3),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, 21, 22),
    "items": ({"type": "array", "items": NUM}, [1, 2], [1, "a"]),
    "prefixItems": ({"type": "array", "prefixItems": [TEXT, NUM]}, ["a", 1], [1, "a"]),
    "minItems": ({"type": "array", "minItems": 2}, [1, 2], [1]),
    "maxItems": ({"type": "array", "maxItems": 2}, [1, 2], [1, 2, 3]),
    "properties": (ONE, {"a": None}, {"a": 1}),
    "required": ({**ONE, "required": ["a"]}, {"a": None}, {"b": 1}),
    "additionalProperties": ({**ONE, "additionalProperties": False}, {"a": None}, {"b": 1}),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n": NUM}},
        {"n1": 2, "m": "x"},
        {"n1": "x"},
    ),
    "minProperties": ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
    "maxProperties": ({"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}),
    "anyOf": ({"anyOf": [NUM, {"type": "null"}]}, None, "a"),
    "oneOf": ({"oneOf": [NUM, {"type": "null"}]}, 1.5, "a"),
    "allOf": ({**NUM, "allOf": [{"minimum": 2}, {"maximum": 4}]}, 3, 5),
    "$ref": ({"$ref": "#/$defs/n", "$defs": {"n": NUM}}, 3, "a"),
    "$defs": ({"$ref": "#/$defs/n", "$defs": {"n": NUM}}, 3, None),
    "definitions": ({"$ref": "#/definitions/n", "definitions": {"n": NUM}}, 3, None),
}
# What stands together in one schema is the other half: merges, order, alternatives with siblings, recursion.
TOGETHER = [
    {
        "type": "object",
        "properties": {"a1": {"type": "null"}},
        "patternProperties": {"^a": {"enum": [None, True]}},
        "additionalProperties": {"const": 5},
    },
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "additionalProperties": True,
    },
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 3, "minimum": 0}},
        "required": ["a"],
        "anyOf": [{"properties": {"a": {"minimum": 2}}}, {"properties": {"a": {"const": 1}}}],
        "additionalProperties": False,
    },
    {"$defs": {"s": {"type": "string", "maxLength": 6}}, "$ref": "#/$defs/s", "minLength": 3},
    {"type": ["string", "null", "integer"], "minimum": 5, "maximum": 50, "maxLength": 2},
    {"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5},
    {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "prefixItems": [{"type": "null"}, {"type": "boolean"}],
        "items": {"type": "integer", "minimum": 0, "maximum": 3},
        "minItems": 1,
        "maxItems": 4,
    },
    {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "a"}},
                "required": ["kind"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "b"}, "v": {"type": "null"}},
                "required": ["kind", "v"],
                "additionalProperties": False,
            },
        ]
    },
    {"type": "object", "required": ["z"], "additionalProperties": {"type": "null"}},
    {"type": "number", "multipleOf": 0.5, "minimum": -2, "exclusiveMaximum": 2},
    *({"type": "string", "format": name} for name in FORMATS),
]
# Those that the checker's own installation brings, whose rules are those of the grammars.
CHECKED = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])


class _Bytes:
    """A vocabulary of single bytes."""

    bos_token_id = None
    eos_token_id = END
    is_tokenizer_wrapper = True
    tokens = (*(bytes([i]) for i in range(256)), b"<end>")
    special_token_ids = (END,)

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


@pytest.fixture(scope="module")
def begin():
    """Return a function from a schema to a matcher at its beginning."""
    tokens = LLTokenizer(_Bytes(), n_vocab=END + 1)

    def begin(schema):
        checked = checked_schema(schema, "p", SchemaLimits(max_bytes=10_000))
        text = json.dumps({**checked, "x-guidance": JSON_STYLE})
        matcher = LLMatcher(tokens, LLMatcher.grammar_from_json_schema(text))
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    return begin


def _accepts(matcher, value):
    text = json.dumps(value).encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


def test_every_enforced_keyword_has_a_case():
    assert set(CASES) == ENFORCED


@pytest.mark.parametrize("keyword", CASES)
def test_the_keyword_is_obeyed_and_nothing_else_forbids_the_value(begin, keyword):
    schema, good, bad = CASES[keyword]
    validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKED)
    assert validator.is_valid(good)
    assert not validator.is_valid(bad)
    assert _accepts(begin(schema), good)
    assert not _accepts(begin(schema), bad)
    without = {k: v for k, v in schema.items() if k != keyword and not k.startswith("$ref")}
    assert _accepts(begin(without), bad)


DATES = {
    "date": (
        ["2024-02-29", "2000-02-29", "0004-02-29", "1999-12-31", "2023-04-30", "0001-01-01"],
        [
            *("2023-02-29", "1900-02-29", "2100-02-29", "2024-02-30", "2023-04-31", "2023-13-01"),
            *("2023-00-10", "2023-01-00", "2023-01-32", "0000-01-01", "2023-1-1", "23-01-01"),
        ],
    ),
    "time": (
        ["00:00:00Z", "23:59:59.999+23:59", "12:30:00-01:00"],
        ["24:00:00Z", "12:60:00Z", "12:30:61Z", "12:30Z", "12:30:00", "12:30:00+24:00"],
    ),
    "date-time": (
        ["2024-02-29T12:30:00Z", "1999-12-31T23:59:59.5+01:00"],
        ["2023-02-29T12:30:00Z", "2024-02-29 12:30:00Z", "2024-02-29", "2024-02-29T25:00:00Z"],
    ),
}


@pytest.mark.parametrize("name", DATES)
def test_days_and_times_are_those_of_the_calendar(begin, name):
    good, bad = DATES[name]
    for value in good:
        assert _accepts(begin({"type": "string", "format": name}), value), value
    for value in bad:
        assert not _accepts(begin({"type": "string", "format": name}), value), value


def test_every_day_and_no_other(begin):
    matcher = begin({"type": "string", "format": "date"})
    day, last = datetime.date(1896, 1, 1), datetime.date(1905, 1, 1)
    for year in range(1896, 1905):
        for month in range(1, 13):
            for number in range(1, 32):
                text = f"{year}-{month:02}-{number:02}"
                is_day = day.isoformat() == text
                assert _accepts(matcher.deep_copy(), text) == is_day, text
                day += datetime.timedelta(days=is_day)
    assert day == last


def test_a_format_beside_a_pattern_is_obeyed_too(begin):
    schema = {"type": "string", "format": "date", "pattern": "^2"}
    assert _accepts(begin(schema), "2024-02-29")
    assert not _accepts(begin(schema), "1924-02-29")
    assert not _accepts(begin(schema), "2023-02-29")


@pytest.mark.parametrize("schema", [c[0] for c in CASES.values()] + TOGETHER, ids=str)
def test_whatever_the_grammar_lets_through_is_valid(begin, schema):
    validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKED)
    texts = [_walk(begin(schema), random.Random(seed)) for seed in range(25)]
    finished = [text for text in texts if text is not None]
    assert finished
    for text in finished:
        validator.validate(json.loads(text))


def _walk(matcher, source):
    """Return a random text of a grammar, None where it does not end in time."""
    written = []
    while not matcher.is_stopped() and len(written) < 1000:
        bits = matcher.compute_bitmask()
        allowed = [i for i in range(END + 1) if bits[i // 8] >> i % 8 & 1]
        if END in allowed:
            break
        # what ends values is preferred, or most walks would not end
        closing = [i for i in allowed if i in b'"]},:e']
        token = source.choice(closing if closing and source.random() < 0.5 else allowed)
        written.append(token)
        assert matcher.consume_token(token)
    return bytes(written) if len(written) < 1000 else None
