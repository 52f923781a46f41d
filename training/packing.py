"""Rows of tokens to train on: generated conversations, rendered by our own formatter, packed without padding.

Every row comes from a seed of its own (seed, kind, number), so a resumed run sees what it would have seen, and any
number of processes may draw rows. Several conversations share a row; `docs` keeps them apart, `positions` start anew.
"""

import collections
import functools
import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import english
import numpy as np

from rose.eval.examples import Example, is_held_out
from rose.eval.rendering import Documents
from rose.eval.tasks import draw_for_training, draw_long_for_training
from rose.eval.text_tasks import notes_of, recalled
from rose.frontend.tokenizer import FolderTokenizer

ENGLISH_SHARE = 0.01
"""Of the documents in short rows."""
ENGLISH_CHARACTERS = 1600
ENGLISH = 2
"""Marks a token of English among those that are learnt."""
FEW_MORE, MOST_MORE = 4, 12


@dataclass(frozen=True)
class Batch:
    """Rows [B, T + 1] of equal length, int32; is_learnt: tokens that count in the loss, ENGLISH or 1."""

    tokens: np.ndarray
    positions: np.ndarray
    docs: np.ndarray
    is_learnt: np.ndarray


class Text:
    """Vocabulary, formatter and corpus of one process."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = FolderTokenizer(path)
        self.documents = Documents(self.tokenizer)
        self.end_of_text = self.tokenizer.control_id("<|endoftext|>")
        self.passages = english.passages()

    def english(self, source: random.Random) -> list[int]:
        """Return some English that ends in end of text."""
        text = english.draw(self.passages, source, ENGLISH_CHARACTERS)
        return [*self.tokenizer.encode(text), self.end_of_text]

    def _next(self, is_long: bool, source: random.Random) -> tuple[list[int], list[int]]:
        """Return a document and what of it is learnt; the end of the row may cut it off."""
        if is_long:
            return self._asked_more(draw_long_for_training(source), MOST_MORE, source)
        if source.random() < ENGLISH_SHARE:
            token_ids = self.english(source)
            return token_ids, [0] + [ENGLISH] * (len(token_ids) - 1)
        example = draw_for_training(source)
        if example.task == "far_copy":
            return self._asked_more(example, FEW_MORE, source)
        token_ids, first = self.documents.whole(example)
        return token_ids, _learnt_from(first, token_ids)

    def _asked_more(
        self, example: Example, most: int, source: random.Random
    ) -> tuple[list[int], list[int]]:
        """Return notes and a question, and up to `most` more questions on the same notes.

        One answer of 40 tokens would be all that 4,000 teach.
        """
        token_ids, first = self.documents.whole(example)
        learnt = _learnt_from(first, token_ids)
        tokens = self.documents.renderer.tokens
        notes = notes_of(example)
        for name, text in source.sample(notes, min(source.randint(0, most), len(notes))):
            more = recalled(name, text, task=example.task, effort=example.effort)
            if is_held_out(more.key):
                continue
            asked, first = self.documents.asked_more(more)
            # In a conversation that goes on, the answer before ends its message and not the turn.
            token_ids[-1] = tokens.end
            learnt[-1] = 0
            token_ids += asked
            learnt += _learnt_from(first, asked)
        return token_ids, learnt

    def row(self, kind: str, length: int, source: random.Random) -> list[np.ndarray]:
        """Return tokens, positions, docs and is_learnt of one row."""
        columns: list[list[int]] = [[], [], [], []]
        number, is_long_due = 0, kind == "long"
        while len(columns[0]) < length:
            token_ids, learnt = self._next(is_long_due, source)
            is_long_due = False
            token_ids = token_ids[: length - len(columns[0])]
            count = len(token_ids)
            for column, more in zip(
                columns, (token_ids, range(count), [number] * count, learnt[:count]), strict=True
            ):
                column.extend(more)
            number += 1
        return [np.array(column, dtype=np.int32) for column in columns]


def _learnt_from(first: int, token_ids: list[int]) -> list[int]:
    return [int(i >= first) for i in range(len(token_ids))]


@functools.cache
def _text(path: Path) -> Text:
    return Text(path)


def batch(path: Path, kinds: Sequence[str], length: int, seed: str) -> Batch:
    """Return a row of `length` + 1 tokens of each kind (short or long)."""
    drawn = [
        _text(path).row(kind, length + 1, random.Random(f"{seed} {kind} {i}"))
        for i, kind in enumerate(kinds)
    ]
    return Batch(*(np.stack(columns) for columns in zip(*drawn, strict=True)))


@dataclass(frozen=True)
class Plan:
    """What each step draws."""

    path: Path
    """tokenizer.json"""
    seed: int
    shape: tuple[int, int]
    """Rows and tokens per row: one for all steps, so that all is compiled once."""
    long_every: int = 5
    long_from: int = 0
    """Step before which no row is long: near copies teach faster what far ones need too."""

    def kinds(self, step: int) -> list[str]:
        """Return the kind of each row of a step."""
        rows = range(step * self.shape[0], (step + 1) * self.shape[0])
        is_late, last = step >= self.long_from, self.long_every - 1
        return ["long" if is_late and n % self.long_every == last else "short" for n in rows]

    def batch(self, step: int) -> Batch:
        """Draw a step's batch."""
        return batch(self.path, self.kinds(step), self.shape[1], f"{self.seed} {step}")


def _begin(path: Path) -> None:
    """Begin a process that draws, in a group of its own: a signal to the trainer's group is the trainer's.

    One that dies of it holds the queue's lock, and `close` would wait for that for ever.
    """
    os.setpgid(0, 0)
    _text(path)


class Source:
    """Draws batches ahead of their use, by processes where there are any; shared by all parts of a run."""

    def __init__(self, plan: Plan, workers: int) -> None:
        self.plan, self._ahead = plan, 4 * workers
        # fork, before the device is used: processes that are spawned would each import torch with the script.
        context = multiprocessing.get_context("fork")
        # Reading the corpus takes seconds: begun here, while the device compiles.
        self._pool = context.Pool(workers, _begin, (plan.path,)) if workers else None

    def draw(self, step: int) -> Batch:
        """Return the batch of one step."""
        if self._pool is None:
            return self.plan.batch(step)
        return self._pool.apply(self.plan.batch, (step,))

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
