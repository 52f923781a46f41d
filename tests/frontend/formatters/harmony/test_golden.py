"""Prompts are token for token those of the published libraries, in both forms of replayed calls.

The file is written by tools/harmony_golden.py.
"""

import json
from pathlib import Path

import pytest

from rose.frontend.formatters.harmony.formatter import HarmonyFormatter

FILE = Path(__file__).parents[3] / "data" / "harmony_golden.json"
GOLDEN = json.loads(FILE.read_text("utf-8"))
FORMS = ("recipient_first", "channel_first")


def _golden(o200k, case, form):
    """Return the library's tokens, results headed as the format's description has them.

    oss-harmony puts the recipient behind the channel there too; no model writes results, so nothing is gained by it.
    """
    if form == "recipient_first":
        return case[form]
    theirs = o200k.encode_with_control("<|channel|>commentary to=assistant<|message|>")
    ours = o200k.encode_with_control(" to=assistant<|channel|>commentary<|message|>")
    return _replaced(case[form], theirs, ours)


def _replaced(token_ids, old, new):
    found, place = [], 0
    while place < len(token_ids):
        is_here = token_ids[place : place + len(old)] == old
        found += new if is_here else token_ids[place : place + 1]
        place += len(old) if is_here else 1
    return found


@pytest.mark.parametrize("form", FORMS)
def test_prompts_are_those_of_the_library(o200k, form):
    formatter = HarmonyFormatter(o200k)
    for case in GOLDEN["cases"]:
        prompt = formatter.encode({**case["body"], "call_header": form})
        assert prompt.token_ids == _golden(o200k, case, form), case["body"]


def test_the_file_has_calls_and_results_in_both_forms(o200k):
    assert GOLDEN["libraries"] == dict(
        zip(FORMS, ("openai-harmony 0.0.8", "oss-harmony 0.0.11"), strict=True)
    )
    assert len(GOLDEN["cases"]) >= 20
    assert all(case["recipient_first"] != case["channel_first"] for case in GOLDEN["cases"])
    texts = [b"".join(map(o200k.token_bytes, c["channel_first"])).decode() for c in GOLDEN["cases"]]
    assert all("<|channel|>commentary to=functions." in text for text in texts)
    # Reasoning of a running tool loop is there, that of finished turns is not.
    bodies = [json.dumps(case["body"]) for case in GOLDEN["cases"]]
    assert any("<|channel|>analysis" in text for text in texts)
    assert any(
        "reasoning" in b and "<|channel|>analysis" not in t
        for b, t in zip(bodies, texts, strict=True)
    )
