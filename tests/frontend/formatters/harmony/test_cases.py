"""The handed cases of kinds parse and render, and the examples P1 to P32 of the format's description."""

import json
from pathlib import Path

import pytest

from rose.frontend.formatters.harmony.formatter import HarmonyFormatter
from rose.frontend.formatters.harmony.responses_body import with_stored_turn
from rose.frontend.tokenizer import decode

DATA = Path(__file__).parents[3] / "data"
CASES = [json.loads(line) for line in (DATA / "handed.jsonl").read_text("utf-8").splitlines()]
EXAMPLES = json.loads((DATA / "harmony_examples.json").read_text("utf-8"))["parse"]


def of_kind(kind):
    found = [case for case in CASES if case["kind"] == kind]
    return pytest.mark.parametrize("case", found, ids=[case["id"] for case in found])


@pytest.fixture(scope="module")
def formatter(o200k):
    return HarmonyFormatter(o200k)


def read(formatter, token_ids, *, declared=(), reason="stop"):
    """Return (answer, streamed deltas), one token per push."""
    decoder = formatter.decoder(declared_tools=declared)
    deltas = [delta for token_id in token_ids for delta in decoder.push([token_id])]
    deltas += decoder.finish(reason)
    return decoder.answer(), deltas


def views(messages):
    return [
        {
            "channel": m.channel,
            "recipient": m.recipient,
            "content_type": m.content_type,
            "content": m.content,
        }
        for m in messages
    ]


@of_kind("parse")
def test_parse_case(formatter, o200k, case):
    given, expected = case["input"], case["expected"]
    assert o200k.encode_with_control(given["text"]) == given["tokens"] or "𠮷" in given["text"]
    reason = "length" if given.get("stopped_by") == "max_tokens" else "stop"
    answer, deltas = read(
        formatter, given["tokens"], declared=given.get("declared_tools", []), reason=reason
    )
    if "messages" in expected:
        assert views(answer.messages) == expected["messages"]
    _check_chat(answer, deltas, dict(expected["chat"]))


def _check_chat(answer, deltas, chat):
    stream = "".join(d.text for d in deltas if d.kind == "content")
    assert stream == (answer.content or "")
    chat.pop("ids_distinct", None)  # ids are made by the server, not by the format
    for key, value in chat.items():
        if key.endswith("_contains"):
            text = getattr(answer, key.removesuffix("_contains"))
            assert all(part in text for part in value), (key, text)
        elif key == "content_must_not_contain":
            assert not any(part in answer.content for part in value), answer.content
        elif key == "stream":
            assert stream == value["concat_of_content_deltas"]
            assert not any(value["no_delta_contains"] in d.text for d in deltas)
        else:
            assert getattr(answer, key) == value, key


@of_kind("render")
def test_render_case(formatter, o200k, case):
    body = case["input"]
    if "stored_turn" in body:
        body = with_stored_turn(body["stored_turn"], body["request"]) | {"api": body["api"]}
    token_ids = formatter.encode(body).token_ids
    text, expected = decode(o200k, token_ids), dict(case["expected"])
    checks = {
        "exact": lambda value: text == value,
        "contains": lambda value: all(part in text for part in value),
        "not_contains": lambda value: not any(part in text for part in value),
        "contains_in_order": lambda value: _is_in_order(text, value),
        "decoded_contains": lambda value: value in text,
        "token_counts": lambda value: {i: token_ids.count(int(i)) for i in value} == value,
        "not_token_sequence": lambda value: str(value)[1:-1] not in str(token_ids),
        "role_of": lambda value: all(_role_of(text, t) == value["role"] for t in value["texts"]),
        "same_as": lambda value: (
            formatter.encode(_with_roles(body, value["replace_role"])).token_ids == token_ids
        ),
    }
    for key, value in expected.items():
        assert checks[key](value), (key, text)


def _is_in_order(text, parts):
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def _role_of(text, part):
    return text[: text.index(part)].rpartition("<|start|>")[2].partition("<|message|>")[0]


def _with_roles(body, names):
    changed = [m | {"role": names.get(m["role"], m["role"])} for m in body["messages"]]
    return body | {"messages": changed}


def test_stop_ids_case(formatter, o200k):
    case = next(case for case in CASES if case["id"] == "cfg-stop-ids")["expected"]
    stops = formatter.encode({"messages": [{"role": "user", "content": "x"}]}).stop_token_ids
    assert set(case["must_stop_on"]) <= set(stops)
    assert not set(case["must_not_stop_on"]) & set(stops)
    emitted = o200k.encode_with_control(case["scripted"]["emits"])
    kept = emitted[: next(i for i, t in enumerate(emitted) if t in stops) + 1]
    assert decode(o200k, kept).endswith(case["scripted"]["tokens_kept_until_and_with"])
    answer, _ = read(formatter, kept)
    assert answer.content == case["scripted"]["content"]
    assert answer.tool_calls == case["scripted"]["tool_calls"]


# Where the published parser raises, or reads markup as a recipient, this is our reading (docs/harmony.md).
# Fields: channel, recipient, content_type, content.
LENIENT = {
    "P10": [("commentary", "bash", None, "x")],  # it raises: unknown role
    "P11": [("commentary", "functions.f", "extra json", "{}")],  # it raises: words left over
    "P12": [("commentary", "functions.f", None, "{}")],  # it reads the second channel into the name
    "P14": [
        ("commentary", "functions.f", None, ""),
        ("final", None, None, "ok"),
    ],  # name as content
    "P17": [("fin", None, None, "")],  # it raises: end inside a header
    "P18": [("analysis", None, None, "x"), (None, None, None, "stray")],  # it raises: no start
    "P20": [(None, None, None, "x")],  # it raises: no channel value
    "P21": [("final", None, "<|constrain|>json", "{}")],  # it reads the type as a recipient
    "P22": [(None, None, None, "S"), (None, None, None, "U")],  # it raises: role user:ann
    "P24": [("final", None, None, "A")],  # it reads the repeated start as a recipient
    "P27": [],  # it raises: nothing was written
    "P28": [("commentary", "functions.f", None, "{}")],  # it raises: second stop token
    "P29": [("analysis", None, None, "x"), ("commentary", "functions.f", None, "{}")],  # it raises
    "P30": [("commentary", "functions.f", "<|constrain|>json extra", "{}")],  # it raises
    "P31": [("commentary", "functions.f", "<|constrain|>json", "{}")],  # it raises
}


@pytest.mark.parametrize("example", EXAMPLES, ids=[e["id"] for e in EXAMPLES])
def test_parse_example(formatter, o200k, example):
    token_ids = example.get("tokens") or o200k.encode_with_control(example["text"])
    answer, _ = read(formatter, token_ids)
    found = [(m.channel, m.recipient, m.content_type, m.content) for m in answer.messages]
    published = example.get("both", example.get("lenient"))
    if example["id"] in LENIENT:
        assert found == LENIENT[example["id"]]
        assert isinstance(published, str) or example["id"] in ("P12", "P14", "P21", "P24")
    else:
        fields = ("channel", "recipient", "content_type")
        expected = [
            (*(m.get(f) for f in fields), "".join(p["text"] for p in m["content"]))
            for m in published
        ]
        assert found == expected
        assert [(m.role, m.name) for m in answer.messages] == [
            (m["role"], m["name"]) for m in published
        ]
