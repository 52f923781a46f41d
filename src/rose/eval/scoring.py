"""Whether an answer is right: exact per task, and whether it is well-formed Harmony."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rose.eval.examples import EFFORTS, Example


@dataclass(slots=True, kw_only=True)
class Reply:
    """What a model answered, whichever way it was asked."""

    content: str | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and arguments as written."""
    is_well_formed: bool = False
    """Reasoning, then one final message or one call, and an end; nothing that the parser had to forgive."""
    reasoning_characters: int = 0


def is_right(example: Example, reply: Reply) -> bool:
    """Judge one reply."""
    if example.judge == "call":
        return _is_call(example, reply)
    if reply.calls or reply.content is None:
        return False
    content, wanted = reply.content, example.content or ""
    if example.judge == "number":
        found = re.findall(r"-?\d+", content.replace("−", "-"))
        return bool(found) and found[-1] == re.findall(r"-?\d+", wanted)[-1]
    if example.judge == "json":
        return _json(content) == _json(wanted)
    if example.judge == "obeys":
        assert example.obeys is not None, "an instruction says what is to be obeyed"
        return obeys(*example.obeys, content)
    return content == wanted


def obeys(rule: str, word: str, content: str) -> bool:
    """Tell whether an answer follows a rule; `word`: what must be in it, or the word the rule names."""
    half = len(content) // 2
    return {
        "capitals": content == content.upper() and word.upper() in content,
        "begin": content.startswith(word),
        "end": content.endswith(word),
        "only": content == word,
        "brackets": content.startswith("[") and content.endswith("]") and word in content,
        "twice": content[:half] == content[half + 1 :] and word in content,
        "refuse": content.endswith(word) and "not" in content,
    }[rule]


def _is_call(example: Example, reply: Reply) -> bool:
    assert example.call is not None, "a call is wanted"
    name, arguments = example.call
    return (
        len(reply.calls) == 1
        and reply.calls[0][0] == name
        and _json(reply.calls[0][1]) == arguments
    )


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def summary(pairs: Iterable[tuple[Example, Reply]]) -> dict[str, Any]:
    """Return shares by task, `harmony` over all replies, and the mean length of reasoning by effort."""
    right: dict[str, list[bool]] = {}
    formed: list[bool] = []
    lengths: dict[str, list[int]] = {effort: [] for effort in EFFORTS}
    for example, reply in pairs:
        right.setdefault(example.task, []).append(is_right(example, reply))
        formed.append(reply.is_well_formed)
        lengths[example.effort].append(reply.reasoning_characters)
    tasks = {task: sum(values) / len(values) for task, values in right.items()}
    if formed:
        tasks["harmony"] = sum(formed) / len(formed)
    means = {e: round(sum(v) / len(v), 1) for e, v in lengths.items() if v}
    return {"tasks": tasks, "reasoning_characters": means, "num_questions": len(formed)}
