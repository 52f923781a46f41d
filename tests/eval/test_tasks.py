"""Generated questions: two sides that do not meet, answers that are right, reasoning that follows the effort."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise

import jsonschema
import pytest

from rose.cli.demo import WEATHER_TOOL
from rose.eval import talk_tasks, tool_tasks
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


def test_calls_are_valid_under_the_schemas_they_are_offered():
    for example in held_out_set("tool_call", 40, seed=5):
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
