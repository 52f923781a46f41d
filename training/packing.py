"""Rows of tokens to train on: generated conversations, rendered by our own formatter, packed without padding.

Every row comes from a seed of its own (seed, kind, number), so a resumed run sees what it would have seen, and any
number of processes may draw rows. Several conversations share a row; `docs` keeps them apart, `positions` start anew.
"""

import collections
import functools
import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import english
import numpy as np

from rose.eval.examples import Example
from rose.eval.tasks import draw_for_training, draw_long_for_training
from rose.eval.tool_tasks import compact
from rose.frontend.formatters.harmony.conversation import call_message
from rose.frontend.formatters.harmony.formatter import HarmonyFormatter
from rose.frontend.formatters.harmony.messages import Message
from rose.frontend.formatters.harmony.render import HarmonyRenderer
from rose.frontend.tokenizer import FolderTokenizer

ENGLISH_SHARE = 0.08
"""Of the documents in short rows; the rest of a row that no conversation fits is English too."""
ENGLISH_CHARACTERS = 1600


@dataclass(frozen=True)
class Batch:
    """Rows [B, T + 1] of equal length, int32; is_learnt: tokens that count in the loss."""

    tokens: np.ndarray
    positions: np.ndarray
    docs: np.ndarray
    is_learnt: np.ndarray


class Text:
    """Tokenizer, formatter and corpus of one process."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = FolderTokenizer(path)
        self.formatter = HarmonyFormatter(self.tokenizer)
        self.renderer = HarmonyRenderer(self.tokenizer)
        self.begin = [self.renderer.tokens.start, *self.tokenizer.encode("assistant")]
        self.end_of_text = self.tokenizer.control_id("<|endoftext|>")
        self.passages = english.passages()

    def answer(self, example: Example) -> list[int]:
        """Return what the model shall write after `<|start|>assistant`."""
        messages = [Message(role="assistant", channel="analysis", content=(example.reasoning,))]
        if example.call is not None:
            name, arguments = example.call
            messages.append(call_message(name, compact(arguments)))
        else:
            assert example.content is not None, "an answer without a call has content"
            messages.append(Message(role="assistant", channel="final", content=(example.content,)))
        token_ids = self.renderer.render_for_training(messages)
        assert token_ids[: len(self.begin)] == self.begin, "the prompt ends where the answer begins"
        return token_ids[len(self.begin) :]

    def document(self, example: Example) -> tuple[list[int], int]:
        """Return prompt and answer, and the length of the prompt."""
        prompt = self.formatter.encode(example.body).token_ids
        return prompt + self.answer(example), len(prompt)

    def english(self, source: random.Random) -> list[int]:
        """Return some English that ends in end of text."""
        text = english.draw(self.passages, source, ENGLISH_CHARACTERS)
        return [*self.tokenizer.encode(text), self.end_of_text]

    def row(self, kind: str, length: int, source: random.Random) -> list[np.ndarray]:
        """Return tokens, positions, docs and is_learnt of one row."""
        columns: list[list[int]] = [[], [], [], []]
        draws = [draw_long_for_training] if kind == "long" else []
        number = 0
        while len(columns[0]) < length:
            if not draws and kind == "short" and source.random() < ENGLISH_SHARE:
                token_ids, first = self.english(source), 1
            else:
                draw = draws.pop() if draws else draw_for_training
                token_ids, first = self.document(draw(source))
                if len(columns[0]) + len(token_ids) > length:
                    token_ids, first = self.english(source), 1
            token_ids = token_ids[: length - len(columns[0])]
            count = len(token_ids)
            learnt = [int(i >= first) for i in range(count)]
            for column, more in zip(
                columns, (token_ids, range(count), [number] * count, learnt), strict=True
            ):
                column.extend(more)
            number += 1
        return [np.array(column, dtype=np.int32) for column in columns]


@functools.cache
def _text(path: Path) -> Text:
    return Text(path)


def batch(path: Path, kind: str, shape: tuple[int, int], seed: str) -> Batch:
    """Return `shape` rows of a kind (short or long)."""
    rows, length = shape
    drawn = [
        _text(path).row(kind, length + 1, random.Random(f"{seed} {kind} {i}")) for i in range(rows)
    ]
    return Batch(*(np.stack(columns) for columns in zip(*drawn, strict=True)))


@dataclass(frozen=True)
class Plan:
    """What each step draws."""

    path: Path
    """tokenizer.json"""
    seed: int
    short: tuple[int, int]
    long: tuple[int, int]
    """Rows and tokens per row."""
    long_every: int = 5

    def kind(self, step: int) -> str:
        """Return the kind of a step's rows."""
        return "long" if step % self.long_every == self.long_every - 1 else "short"

    def batch(self, step: int) -> Batch:
        """Draw a step's batch."""
        kind = self.kind(step)
        shape = self.long if kind == "long" else self.short
        return batch(self.path, kind, shape, f"{self.seed} {step}")


class Source:
    """Draws batches ahead of their use, by processes where there are any; shared by all parts of a run."""

    def __init__(self, plan: Plan, workers: int) -> None:
        self.plan, self._ahead = plan, 4 * workers
        # spawn: forking a process that holds a CUDA context is not safe.
        context = multiprocessing.get_context("spawn")
        self._pool = context.Pool(workers) if workers else None

    def batches(self, first: int) -> Iterator[Batch]:
        """Yield the batches of steps `first`, `first + 1`, ... without end."""
        if self._pool is None:
            while True:
                yield self.plan.batch(first)
                first += 1
        draw, plan = self._pool.apply_async, self.plan
        ahead = collections.deque(draw(plan.batch, (first + i,)) for i in range(self._ahead))
        while True:
            ready = ahead.popleft().get()
            ahead.append(draw(plan.batch, (first + self._ahead,)))
            first += 1
            yield ready

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.terminate()
