"""`rose harmony`: JSON lines in, JSON lines out, bad lines answered."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rose.cli.harmony import harmony

DATA = Path(__file__).parents[1] / "data"
CASES = [json.loads(line) for line in (DATA / "handed.jsonl").read_text("utf-8").splitlines()]


def run(*arguments, lines):
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    result = CliRunner().invoke(harmony, arguments, input=text.encode("utf-8", "surrogatepass"))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, [json.loads(line) for line in result.stdout.splitlines()]


def test_parse_cases_come_out_as_given():
    cases = [c for c in CASES if c["kind"] == "parse"]
    fields = ("tokens", "declared_tools", "stopped_by")
    code, replies = run(
        "parse", lines=[{k: v for k, v in c["input"].items() if k in fields} for c in cases]
    )
    assert (code, len(replies)) == (0, len(cases))
    for case, reply in zip(cases, replies, strict=True):
        assert list(reply) == ["messages", "chat"]
        assert list(reply["chat"]) == ["content", "reasoning", "tool_calls", "finish_reason"]
        assert case["expected"].get("messages", reply["messages"]) == reply["messages"]
        for key in ("content", "reasoning", "tool_calls", "finish_reason"):
            expected = case["expected"]["chat"].get(key, reply["chat"][key])
            assert reply["chat"][key] == expected, case["id"]


def test_render_cases_are_answered_with_text_and_tokens():
    cases = [c for c in CASES if c["kind"] == "render"]
    code, replies = run("render", lines=[c["input"] for c in cases])
    assert (code, len(replies)) == (0, len(cases))
    for case, reply in zip(cases, replies, strict=True):
        assert list(reply) == ["text", "tokens"]
        assert case["expected"].get("exact", reply["text"]) == reply["text"]
        for part in case["expected"].get("contains", []):
            assert part in reply["text"]


def test_bad_lines_are_answered_in_place_and_the_others_go_on():
    good = {"messages": [{"role": "user", "content": "\ud800 é"}]}
    lines = [good, "nope\n", "[1]\n", {"messages": []}, "\n", "[" * 5000 + "\n", good]
    code, replies = run("render", lines=lines)
    assert code == 1
    assert ["error" in reply for reply in replies] == [False, True, True, True, True, False]
    assert replies[3]["error"]["param"] == "messages"
    assert [reply["error"]["line"] for reply in replies[1:5]] == [2, 3, 4, 6]


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"tokens": "x"},
        {"tokens": [1.5]},
        {"tokens": [], "declared_tools": "x"},
        {"tokens": [], "declared_tools": [1]},
        {"tokens": [], "stopped_by": 3},
    ],
)
def test_bad_parse_lines_say_what_is_allowed(line):
    code, replies = run("parse", lines=[line])
    assert code == 1
    assert "allowed:" in replies[0]["error"]["message"]


def test_a_misspelt_key_is_named():
    _, [misspelt, other] = run("parse", lines=[{"token": [1]}, {"ids": [1]}])
    assert "did you mean tokens by 'token'?" in misspelt["error"]["message"]
    assert "found 'ids'" in other["error"]["message"]


def test_ids_outside_the_vocabulary_are_read():
    code, replies = run("parse", lines=[{"tokens": [10**30, 201088]}])
    assert (code, replies[0]["chat"]["content"]) == (0, "\ufffd\ufffd")


def test_a_folders_tokenizer_is_used(tmp_path):
    code, _ = run("parse", "--model", str(tmp_path / "absent"), lines=[])
    assert code == 2
