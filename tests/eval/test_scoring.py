"""What counts as right, as obeyed and as well-formed."""

from __future__ import annotations

import json

import httpx
import pytest

from rose.eval.asking import AskError, HttpAsker, token_limit
from rose.eval.examples import Example, user
from rose.eval.run import tables
from rose.eval.scoring import Reply, is_right, obeys, summary


def _example(**changes):
    values = {"task": "t", "key": "k", "messages": [user("?")], "reasoning": "r", "content": "c"}
    return Example(**(values | changes))


@pytest.mark.parametrize(
    ("judge", "wanted", "right", "wrong"),
    [
        ("exact", "AB", "AB", "AB "),
        ("number", "3 - 5 = -2.", "It is -2", "It is 2"),
        ("number", "1 + 1 = 2.", "2", "two"),
        ("json", '{"a":1}', '{ "a": 1 }', '{"a":1'),
    ],
)
def test_content_is_judged_by_kind(judge, wanted, right, wrong):
    example = _example(judge=judge, content=wanted)
    assert is_right(example, Reply(content=right))
    assert not is_right(example, Reply(content=wrong))
    assert not is_right(example, Reply(content=right, calls=[("f", "{}")]))


def test_a_call_needs_the_name_the_arguments_and_to_be_the_only_one():
    example = _example(judge="call", content=None, call=("f", {"a": [1, 2]}))
    assert is_right(example, Reply(calls=[("f", '{"a": [1, 2]}')]))
    for calls in (
        [("g", '{"a":[1,2]}')],
        [("f", '{"a":[2,1]}')],
        [("f", '{"a":')],
        [],
        [("f", '{"a":[1,2]}')] * 2,
    ):
        assert not is_right(example, Reply(calls=calls))


@pytest.mark.parametrize(
    ("rule", "word", "right", "wrong"),
    [
        ("capitals", "Oslo", "THE CAPITAL IS OSLO.", "The capital is Oslo."),
        ("begin", "Well.", "Well. It is Oslo.", "It is Oslo. Well."),
        ("end", "Over.", "Oslo. Over.", "Over. Oslo."),
        ("only", "Oslo", "Oslo", "Oslo."),
        ("brackets", "Oslo", "[Oslo.]", "[Oslo."),
        ("twice", "Oslo", "Oslo. Oslo.", "Oslo."),
        ("refuse", "Stop.", "I may not talk about that. Stop.", "It is Oslo. Stop."),
    ],
)
def test_an_instruction_is_obeyed_or_not(rule, word, right, wrong):
    assert obeys(rule, word, right)
    assert not obeys(rule, word, wrong)


def test_a_summary_counts_by_task_and_form_over_all():
    replies = [
        Reply(content="c", is_well_formed=True, reasoning_characters=4),
        Reply(content="x", is_well_formed=True, reasoning_characters=8),
        Reply(content="c", is_well_formed=False),
    ]
    examples = [_example(task="a"), _example(task="a"), _example(task="b", effort="high")]
    found = summary(zip(examples, replies, strict=True))
    assert found["tasks"] == {"a": 0.5, "b": 1.0, "harmony": pytest.approx(2 / 3)}
    assert found["reasoning_characters"] == {"medium": 6.0, "high": 0.0}


def test_each_table_has_one_unit_and_differences_to_the_first_format():
    runs = [
        {"weights": w, "tasks": {"copy": share}, "reasoning_characters": {"low": 9.0}}
        for w, share in (("mxfp4", 0.9), ("bf16", 1.0))
    ]
    formats = ["mxfp4", "bf16", "bf16 - mxfp4"]
    assert tables(runs) == {
        "answers right, percent": [["task", *formats], ["copy", "90.0", "100.0", "+10.0"]],
        "reasoning, characters on average": [["effort", *formats], ["low", "9", "9", "+0"]],
    }


def test_runs_with_a_kv_format_of_their_own_are_named_so():
    plain = {"weights": "mxfp4", "activations": "float32", "kv": "float32"}
    runs = [
        {**plain, **kv, "tasks": {"copy": 1.0}, "reasoning_characters": {}}
        for kv in ({}, {"projections": "fp8_block", "kv": "fp8_e4m3"})
    ]
    second = "mxfp4, projections fp8_block, KV fp8_e4m3"
    assert tables(runs)["answers right, percent"][0] == [
        "task",
        "mxfp4",
        second,
        f"{second} - mxfp4",
    ]


def _asker(monkeypatch, handler):
    client = httpx.Client
    monkeypatch.setattr(
        httpx, "Client", lambda **o: client(transport=httpx.MockTransport(handler), **o)
    )
    return HttpAsker("http://server/v1/", model="m", api_key="secret")


def test_a_server_is_asked_greedily_and_read_back(monkeypatch):
    asked = []

    def handler(request):
        # As clients of such servers write addresses, with or without /v1.
        assert str(request.url) == "http://server/v1/chat/completions"
        assert request.headers["authorization"] == "Bearer secret"
        asked.append(json.loads(request.content))
        message = {"content": "c", "reasoning": "thought"}
        return httpx.Response(
            200, json={"choices": [{"message": message, "finish_reason": "stop"}]}
        )

    example = _example(date="2026-01-01")
    [reply] = _asker(monkeypatch, handler).ask([example])
    assert is_right(example, reply)
    assert reply.is_well_formed
    [body] = asked
    assert body["temperature"] == 0
    assert body["max_completion_tokens"] == token_limit(example)
    assert "conversation_date" not in body


def test_an_answer_cut_off_is_not_well_formed_and_an_error_names_the_status(monkeypatch):
    def cut(_request):
        choice = {"message": {"content": None, "reasoning": "x"}, "finish_reason": "length"}
        return httpx.Response(200, json={"choices": [choice]})

    [reply] = _asker(monkeypatch, cut).ask([_example()])
    assert not reply.is_well_formed
    monkeypatch.undo()
    with pytest.raises(AskError, match="status 500"):
        _asker(monkeypatch, lambda _: httpx.Response(500, text="broken")).ask([_example()])
