"""Pieces of an answer as text completions; the twin of `chat.py` for POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from rose.frontend.generation import Job, Piece
from rose.frontend.schemas import Completion, CompletionChoice


class CompletionWriter:
    """Writes the chunks of one text completion."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def chunks(self, piece: Piece) -> list[Completion]:
        """Return the chunk of one piece."""
        text = "".join(delta.text for delta in piece.deltas)
        if not text and piece.finish_reason is None:
            return []
        choice = CompletionChoice(index=piece.index, text=text, finish_reason=piece.finish_reason)
        return [self._new_chunk([choice])]

    def usage_chunk(self) -> Completion:
        """Return the chunk after the last choice: no choices, the usage."""
        chunk = self._new_chunk([])
        chunk.usage = self._job.usage()
        return chunk

    def _new_chunk(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self._job.answer_id,
            created=self._job.created,
            model=self._job.model,
            choices=choices,
            usage=None if self._job.with_usage else UNSET,
        )


class CompletionFold:
    """Adds chunks up to a whole completion."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._choices = {run.index: CompletionChoice(index=run.index, text="") for run in job.runs}

    def add(self, chunks: Iterable[Completion]) -> None:
        """Take more chunks of the same answer."""
        for chunk in chunks:
            for choice in chunk.choices:
                whole = self._choices[choice.index]
                whole.text += choice.text
                whole.finish_reason = choice.finish_reason or whole.finish_reason

    def completion(self) -> Completion:
        """Return the answer; every choice has ended."""
        return Completion(
            id=self._job.answer_id,
            created=self._job.created,
            model=self._job.model,
            choices=[self._choices[index] for index in sorted(self._choices)],
            usage=self._job.usage(),
        )
