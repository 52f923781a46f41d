"""Script files: text and token ids become answers; wrong lines are listed."""

from __future__ import annotations

import pytest

from rose.cli.scripts import read_script
from rose.utils.errors import ConfigError


def _write(tmp_path, *lines):
    path = tmp_path / "script.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_text_becomes_tokens_with_control_tokens(tmp_path):
    path = _write(tmp_path, '{"text": "<|channel|>final<|message|>hello world<|return|>"}')
    [answer] = read_script(path, None)
    assert answer["tokens"] == [200005, 17196, 200008, 24912, 2375, 200002]


def test_ids_and_options_are_kept(tmp_path):
    path = _write(tmp_path, '{"tokens": [1, 2], "delay_ms": 5, "error": "x"}', "", '{"tokens": []}')
    first, second = read_script(path, None)
    assert (first["tokens"], first["delay_ms"], first["error"]) == ([1, 2], 5.0, "x")
    assert second["tokens"] == []


def test_needs_are_text_or_tokens(tmp_path):
    path = _write(tmp_path, '{"text": "a", "needs": ["<|start|>user", [1, 2]]}')
    [answer] = read_script(path, None)
    assert answer["needs"] == [[200006, 1428], [1, 2]]


def test_every_wrong_line_is_listed(tmp_path):
    lines = (
        '{"tokens": [1]}',
        "{",
        '{"token": [1]}',
        "[1]",
        '{"text": "a", "tokens": [1]}',
        '{"text": 3}',
        '{"text": "a", "needs": 3}',
        '{"text": "a", "needs": [3]}',
    )
    with pytest.raises(ConfigError) as caught:
        read_script(_write(tmp_path, *lines), None)
    assert [f"line {n}:" in p for n, p in enumerate(caught.value.problems, start=2)] == [True] * 7
    assert "allowed fields: text, tokens" in str(caught.value)


def test_an_empty_script_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="has no lines"):
        read_script(_write(tmp_path, "", ""), None)
