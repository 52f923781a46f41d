"""What one generated question is: a chat body, the answer that is right, and how an answer is judged.

Used by training (which learns the answer) and by `rose eval` (which asks). Standard library only. Which draws belong to
the test set is decided by a hash of what is asked, so that training never sees them, whatever its seed.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

HELD_OUT_ONE_IN = 16
EFFORTS = ("low", "medium", "high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question and its answer."""

    task: str
    key: str
    """What is asked, without its dress: decides whether it is held out."""
    messages: list[dict[str, Any]]
    reasoning: str
    content: str | None = None
    """The final answer; None where a tool is to be called."""
    call: tuple[str, dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    response_format: dict[str, Any] | None = None
    effort: str = "medium"
    date: str | None = None
    obeys: tuple[str, str] | None = None
    """Of instructions: the rule and its word, see `scoring.obeys`."""
    judge: str = "exact"
    """exact (content), number (the last one in the content), json, call, obeys."""

    @property
    def body(self) -> dict[str, Any]:
        """Return the body of the chat request."""
        body: dict[str, Any] = {"messages": self.messages, "reasoning_effort": self.effort}
        if self.tools:
            body["tools"] = self.tools
        if self.response_format is not None:
            body["response_format"] = self.response_format
        if self.date is not None:
            body["conversation_date"] = self.date
        return body


Draw = Callable[[random.Random], Example]


def is_held_out(key: str) -> bool:
    """Tell whether a question belongs to the test set."""
    return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


def draw_from(draw: Draw, source: random.Random, *, held_out: bool) -> Example:
    """Draw until a question of the wanted side comes."""
    while True:
        example = draw(source)
        if is_held_out(example.key) is held_out:
            return example


def user(text: str) -> dict[str, Any]:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def by_effort(effort: str, low: str, medium: str, high: str) -> str:
    """Return the reasoning for an effort."""
    return {"low": low, "medium": medium, "high": high}[effort]
