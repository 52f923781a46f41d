"""Generated questions: two sides that do not meet, answers that are right, reasoning that follows the effort."""

from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise

import jsonschema
import pytest

from rose.cli.demo import WEATHER_TOOL
from rose.eval import conversations, talk_tasks, text_tasks, tool_tasks
from rose.eval.examples import draw_from, is_held_out
from rose.eval.scoring import Reply, is_right
from rose.eval.tasks import ASKED, SHARES, TASKS, draw_for_training, held_out_set
from rose.eval.tool_tasks import compact

SHORT = [task for task in ASKED if task != "long_copy"]


def _right_reply(example):
    if example.call is not None:
        name, arguments = example.call
        return Reply(calls=[(name, compact(arguments))])
    return Reply(content=example.content)


def test_what_is_asked_is_never_trained_on():
    source = random.Random(1)
    trained = {draw_for_training(source).key for _ in range(3000)}
    asked = {e.key for task in SHORT for e in held_out_set(task, 20, seed=3)}
    assert not trained & asked
    assert all(map(is_held_out, asked))


def test_equal_seeds_ask_the_same_and_others_do_not():
    assert held_out_set("reverse", 5, seed=1) == held_out_set("reverse", 5, seed=1)
    assert held_out_set("reverse", 5, seed=1) != held_out_set("reverse", 5, seed=2)


@pytest.mark.parametrize("task", ASKED)
def test_the_right_answer_is_scored_right_and_the_next_questions_answer_wrong(task):
    examples = held_out_set(task, 3 if task == "long_copy" else 12, seed=0)
    assert all(is_right(e, _right_reply(e)) for e in examples)
    mixed = [is_right(a, _right_reply(b)) for a, b in pairwise(examples)]
    assert sum(mixed) <= len(mixed) // 3, "answers of other questions pass"
    assert not any(is_right(e, Reply(content="")) for e in examples)


def test_sums_reversals_and_orders_are_what_python_says():
    for example in held_out_set("arithmetic", 60, seed=5):
        asked, result = example.content.removesuffix(".").split(" = ")
        assert eval(asked) == int(result)
        assert f"{result}" in example.reasoning or "-" in result or example.effort == "low"
    for example in held_out_set("reverse", 20, seed=5):
        assert example.messages[0]["content"].endswith(example.content[::-1])
    for example in held_out_set("sort", 20, seed=5):
        listed = example.messages[0]["content"].removeprefix("Sort these words: ").split(", ")
        assert example.content == ", ".join(sorted(listed))


def test_questions_stay_the_same():
    """Scores of models trained at different times are of the same questions."""
    drawn = [
        (e.key, e.messages, e.reasoning, e.content, e.call, e.tools, e.effort, e.date)
        for task in ASKED[: ASKED.index("follow_up") + 1]
        for e in held_out_set(task, 4, seed=2026)
    ]
    assert hashlib.sha256(repr(drawn).encode()).hexdigest()[:16] == "6c5bf8c1ae439901"


def test_small_differences_below_zero_are_taught_and_the_held_out_ones_are_not():
    source = random.Random(3)
    keys = {draw_from(text_tasks.below_zero, source, held_out=False).key for _ in range(2000)}
    below = {f"{a}-{b}" for b in range(10) for a in range(b)}
    assert below - keys == {"2-5", "6-7", "7-9"}
    assert keys <= below
    assert {"6-7"} <= {e.key for e in held_out_set("arithmetic", 200, seed=1)}


def test_calls_in_another_order_are_taught_and_the_held_out_ones_are_not():
    source = random.Random(3)
    for _ in range(200):
        example = draw_from(tool_tasks.turned_call, source, held_out=False)
        name, arguments = example.call
        # Held out by the same key as a `tool_call`, whatever the task is called.
        assert example.key == f"call {name} {tool_tasks.compact(arguments)}"
        asked = example.messages[0]["content"]
        listed = re.split(r" and |, |: |with ", asked.rstrip("."))[1:]
        in_order = [f"{key} {str(value).lower()}" for key, value in arguments.items()]
        assert sorted(listed) == sorted(in_order)
        assert listed != in_order
    assert "turned_call" not in ASKED


@pytest.mark.parametrize(
    ("draw", "numbers"),
    [(conversations.follow_up, {2, 3}), (conversations.conversation, {2, 3, 4})],
)
def test_conversations_hold_right_answers_to_questions_that_are_not_held_out(draw, numbers):
    source, found, judges = random.Random(4), set(), set()
    for _ in range(150):
        example = draw_from(draw, source, held_out=True)
        asked = [m for m in example.messages if m["role"] == "user"]
        answers = [
            m["content"] for m in example.messages if m.get("content") and m["role"] == "assistant"
        ]
        assert len(asked) == len(answers) + 1
        assert example.messages[-1] is asked[-1]
        found.add(len(asked))
        judges.add(example.judge)
        for question, answer in zip(asked, answers, strict=False):
            text = question["content"]
            if " = " in answer:  # a sum
                sides = answer.removesuffix(".").split(" = ")
                assert eval(sides[0]) == int(sides[1])
                assert not is_held_out(sides[0].replace(" ", ""))
            elif text.split(": ")[0] in ("Reverse this string", "Write backwards", "Reverse"):
                assert text.endswith(": " + answer[::-1])
                assert not is_held_out(f"reverse {answer[::-1]}")
    assert found == numbers
    assert judges == {"number", "exact", "call"}


def test_small_talk_is_taught_inside_conversations_and_is_no_part_of_the_score():
    def asked(draw):
        source = random.Random(6)
        drawn = [draw(source) for _ in range(300)]
        return {m["content"] for e in drawn for m in e.messages if m["role"] == "user"}

    assert asked(conversations.conversation) & set(talk_tasks.TALK)
    assert not asked(conversations.follow_up) & set(talk_tasks.TALK)


def test_tools_of_a_conversation_are_offered_once_and_each_call_is_answered_under_its_own_id():
    num_calls = []
    for example in held_out_set("follow_up", 60, seed=5):
        names = [tool["function"]["name"] for tool in example.tools]
        assert len(names) == len(set(names))
        calls = [c for m in example.messages for c in m.get("tool_calls", [])]
        answered = [m["tool_call_id"] for m in example.messages if m["role"] == "tool"]
        assert [c["id"] for c in calls] == answered
        assert len(set(answered)) == len(answered)
        assert {c["function"]["name"] for c in calls} <= set(names)
        assert all(json.loads(c["function"]["arguments"]) for c in calls)
        num_calls.append(len(calls))
    assert set(num_calls) == {0, 1, 2}


def test_calls_are_valid_under_the_schemas_they_are_offered():
    for example in held_out_set("tool_call", 40, seed=5) + [
        e for e in held_out_set("follow_up", 60, seed=5) if e.call is not None
    ]:
        name, arguments = example.call
        [schema] = [
            t["function"]["parameters"] for t in example.tools if t["function"]["name"] == name
        ]
        jsonschema.validate(arguments, schema)


def test_more_effort_gives_longer_reasoning():
    lengths = defaultdict(lambda: defaultdict(list))
    source = random.Random(2)
    for task in SHORT:
        for _ in range(60):
            example = draw_from(TASKS[task], source, held_out=False)
            lengths[task][example.effort].append(len(example.reasoning))
    for task, by_effort in lengths.items():
        low, medium, high = (sum(v) / len(v) for v in map(by_effort.get, ("low", "medium", "high")))
        assert low < medium < high, task


def test_every_task_is_trained_and_the_demo_tool_among_them():
    assert set(SHARES) | {"long_copy"} == set(TASKS)
    assert tool_tasks.WEATHER == WEATHER_TOOL
    assert "Hello!" in talk_tasks.TALK


def test_the_generator_needs_neither_torch_nor_the_frontend():
    program = (
        "import sys; sys.modules['torch'] = sys.modules['msgspec'] = None\n"
        "import rose.eval.tasks, rose.eval.scoring\n"
        "assert not [m for m in sys.modules if m.startswith('rose.frontend')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
