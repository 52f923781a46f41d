"""The table of tasks: what training draws and how often, and what `rose eval` asks."""

from __future__ import annotations

import datetime
import random
from dataclasses import replace

from rose.eval import conversations, talk_tasks, text_tasks, tool_tasks
from rose.eval.examples import Draw, Example, draw_from

TASKS: dict[str, Draw] = {
    "arithmetic": text_tasks.arithmetic,
    "copy": text_tasks.copy,
    "reverse": text_tasks.reverse,
    "sort": text_tasks.sort,
    "count": text_tasks.count,
    "far_copy": text_tasks.far_copy,
    "span_copy": text_tasks.span_copy,
    "long_copy": text_tasks.long_copy,
    "tool_call": tool_tasks.tool_call,
    "tool_result": tool_tasks.tool_result,
    "tool_missing": tool_tasks.tool_missing,
    "json": tool_tasks.json_extraction,
    "instruction": talk_tasks.instruction,
    "turns": talk_tasks.turns,
    "follow_up": conversations.follow_up,
    "conversation": conversations.conversation,
    "below_zero": text_tasks.below_zero,
    "turned_call": tool_tasks.turned_call,
    "acknowledge": talk_tasks.acknowledge,
    "talk": talk_tasks.talk,
    "repeats": text_tasks.repeats,
    "spelling": text_tasks.spelling,
}
SHARES: dict[str, float] = {
    "arithmetic": 18,
    "copy": 10,
    "reverse": 12,
    "sort": 10,
    "count": 7,
    "far_copy": 6,
    "span_copy": 2,
    "tool_call": 16,
    "tool_result": 9,
    "tool_missing": 8,
    "json": 7,
    "instruction": 12,
    "turns": 4,
    "follow_up": 12,
    "conversation": 8,
    "below_zero": 3,
    "turned_call": 6,
    "acknowledge": 1,
    "talk": 3,
    "repeats": 6,
    "spelling": 7,
}
"""Of training's short rows; `long_copy` comes in long rows of its own."""
TAUGHT_ONLY = (
    "talk",
    "acknowledge",
    "repeats",
    "spelling",
    "conversation",
    "below_zero",
    "turned_call",
)
ASKED = tuple(name for name in TASKS if name not in TAUGHT_ONLY)
"""Asked by `rose eval`."""
TEXTS = "texts"
"""What `rose eval` calls the log-probabilities of fixed texts, which nobody is asked."""
OFFERED_FOR_NOTHING = 0.15
"""Share of the plain questions that come with tools that are not needed."""


def dressed(example: Example, source: random.Random) -> Example:
    """Give a question a date, or none, and now and then tools that it does not take."""
    day = datetime.date(2024, 6, 1) + datetime.timedelta(days=source.randint(0, 3650))
    example = replace(example, date=day.isoformat() if source.random() < 0.8 else None)
    is_plain = not example.tools and example.response_format is None
    if (
        is_plain
        and example.task not in ("talk", "tool_missing")
        and source.random() < OFFERED_FOR_NOTHING
    ):
        offered = source.choice(
            [[tool_tasks.WEATHER], [tool_tasks.WEATHER, tool_tasks.SEARCH], [tool_tasks.FORECAST]]
        )
        example = replace(example, tools=offered)
    return example


def draw_for_training(source: random.Random) -> Example:
    """Draw a short question that is not held out."""
    name = source.choices(list(SHARES), weights=list(SHARES.values()))[0]
    return dressed(draw_from(TASKS[name], source, held_out=False), source)


def draw_long_for_training(source: random.Random) -> Example:
    """Draw a `long_copy` that is not held out."""
    return dressed(draw_from(TASKS["long_copy"], source, held_out=False), source)


def held_out_set(task: str, count: int, *, seed: int) -> list[Example]:
    """Return the held-out questions of one task, the same for the same seed."""
    source = random.Random(f"{seed} {task}")
    return [dressed(draw_from(TASKS[task], source, held_out=True), source) for _ in range(count)]
