"""How long cells take on a CPU, told before they begin: the usual ones are those of a large GPU."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rose.bench.session import Session
from rose.bench.sweep import DECODE_STEPS, decode_milliseconds, prefill_seconds

SAMPLE_TOKENS = (256, 1024)
"""Of the two prompts by which a CPU is judged."""
SAMPLE_STEPS = 16
"""Of one sequence, by which it is judged too."""
FEW_STEPS = 1000
"""With so many steps and no long prompt nothing is judged: half a minute of the tiny model on two cores."""
SHORT_SECONDS = 60.0


def warn_of_minutes(session: Session, cells: Sequence[Mapping[str, Any]]) -> None:
    """Say what a CPU needs at least for cells, given by their arguments, where that is long."""
    engine, prompts = session.engine, session.prompts
    held = engine.table.max_tokens
    works = [work_of(cell, held, is_caching=engine.table.is_caching) for cell in cells]
    num_steps = sum(work.steps for work in works)
    short, long = SAMPLE_TOKENS
    is_short = num_steps <= FEW_STEPS and all(work.tokens <= long for work in works)
    # A KV cache that holds less than two of the longer samples may refuse one.
    if session.setup.device.kind != "cpu" or is_short or held < 2 * long:
        return
    session.progress.now(f"timing prompts of {short} and {long} tokens and {SAMPLE_STEPS} steps")
    # Once before: in the shorter sample, what is done once would pass for time of layers and hide that of attention.
    prefill_seconds(engine, prompts, short)
    one, other = (prefill_seconds(engine, prompts, n) for n in SAMPLE_TOKENS)
    step_ms = statistics.median(decode_milliseconds(engine, prompts, 1, short, steps=SAMPLE_STEPS))
    # Seconds of n tokens are linear n + square n^2: layers, and attention to what stands before.
    square = max(0.0, (other / long - one / short) / (long - short))
    linear = other / long - square * long
    seconds = sum(w.prompts * (linear * w.tokens + square * w.tokens**2) for w in works)
    # More sequences and longer contexts make a step longer; by how much is not asked.
    seconds += num_steps * step_ms / 1e3
    if seconds > SHORT_SECONDS:
        session.progress.say(
            f"these cells take about {seconds / 60:.1f} minutes on this CPU, or more; smaller numbers take less "
            "(see --help); --until and Ctrl-C end earlier, with what is measured by then"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a cell computes."""

    prompts: int = 0
    tokens: int = 0
    """Of each prompt."""
    steps: int = 0
    """That generate, of decode and load."""


def work_of(cell: Mapping[str, Any], held: int, *, is_caching: bool = True) -> Work:
    """Return what a cell computes; nothing where it is left out, or has an end or a length of its own.

    Units  cell: its arguments; held: tokens of the KV cache; is_caching: with the prefix cache
    """
    if "steps" in cell or cell.get("seconds") is not None:
        return Work()
    if "prompt_tokens" in cell:  # mixed: the long ones
        work, at_once = Work(prompts=cell["repeats"] + 1, tokens=cell["prompt_tokens"]), 1
    elif "context" in cell:
        steps = DECODE_STEPS * (cell["repeats"] if is_caching else 1)
        work = Work(prompts=cell["batch"], tokens=cell["context"], steps=steps)
        at_once = cell["batch"]
    elif "in_flight" in cell:
        at_once = cell["in_flight"]
        steps = cell["rounds"] * cell["output_tokens"]
        work = Work(prompts=at_once * cell["rounds"], tokens=cell["input_tokens"], steps=steps)
    else:
        many = cell.get("num_prompts")
        prompts = cell["repeats"] * many if many else cell["repeats"] + 1
        work, at_once = Work(prompts=prompts, tokens=cell["tokens"]), 1
    if at_once * work.tokens >= held:
        return Work()
    # Made up, prompts take no time.
    return replace(work, prompts=0, tokens=0) if cell.get("is_filled") else work
