"""Conversations of several questions, each with an answer of its own: sums, strings and tools in any mix.

Who has learnt sums as first questions only answers a second one with what the first one was. Earlier answers stand here
as clients send them back, right and without reasoning; only the last question is asked, or learnt.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from rose.eval import talk_tasks, text_tasks, tool_tasks
from rose.eval.examples import Draw, Example, draw_from

PLAIN: tuple[Draw, ...] = (
    text_tasks.arithmetic,
    text_tasks.arithmetic,
    text_tasks.below_zero,
    text_tasks.copy,
    text_tasks.reverse,
)
MORE: tuple[Draw, ...] = (*PLAIN, text_tasks.sort, text_tasks.count, talk_tasks.talk)
"""What people ask before and after; `follow_up` leaves it out, so that its score is of few kinds."""
TOOL_SHARE = 0.25
"""Of the questions, earlier ones and last ones alike."""


def follow_up(source: random.Random) -> Example:
    """Ask the second or third question of a conversation."""
    return _asked_after(source, "follow_up", PLAIN, source.randint(1, 2))


def conversation(source: random.Random) -> Example:
    """Ask the second to fourth question of a conversation, small talk among them. For training only."""
    return _asked_after(source, "conversation", MORE, source.randint(1, 3))


def _asked_after(
    source: random.Random, task: str, plain: tuple[Draw, ...], num_before: int
) -> Example:
    """Return a question behind `num_before` answered ones.

    It keeps its key, so that what is held out as a first question is held out here. Earlier questions are none of the
    held-out ones, whichever side the last is on.
    """
    before = [
        draw_from(_kind(source, plain, tool_tasks.tool_result), source, held_out=False)
        for _ in range(num_before)
    ]
    last = _kind(source, plain, tool_tasks.tool_call)(source)
    messages: list[dict[str, Any]] = []
    for number, example in enumerate(before):
        messages += _numbered(example.messages, number)
        messages.append({"role": "assistant", "content": example.content})
    # Tools are offered for a whole conversation.
    offered = {
        tool["function"]["name"]: tool for example in (*before, last) for tool in example.tools
    }
    return replace(
        last, task=task, messages=[*messages, *last.messages], tools=list(offered.values())
    )


def _kind(source: random.Random, plain: tuple[Draw, ...], with_tool: Draw) -> Draw:
    return with_tool if source.random() < TOOL_SHARE else source.choice(plain)


def _numbered(messages: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return messages whose call, if there is one, has an id of its own in the conversation."""
    name = f"call_{number + 1}"
    numbered = []
    for message in messages:
        if "tool_calls" in message:
            message = {**message, "tool_calls": [{**c, "id": name} for c in message["tool_calls"]]}
        elif "tool_call_id" in message:
            message = {**message, "tool_call_id": name}
        numbered.append(message)
    return numbered
