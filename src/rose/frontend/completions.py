"""Pieces of an answer as text completions; the twin of `chat.py` for POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from rose.frontend.generation import Job, Piece
from rose.frontend.logprobs import TokenScore
from rose.frontend.schemas import Completion, CompletionChoice, CompletionLogprobs
from rose.frontend.sse import ChunkWriter


class CompletionWriter(ChunkWriter):
    """Writes the chunks of one text completion."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def chunks(self, piece: Piece) -> list[Completion]:
        """Return the chunk of one piece."""
        text = "".join(delta.text for delta in piece.deltas)
        # text may be empty with log-probabilities only at the end, where there is a reason
        if not text and piece.finish_reason is None:
            return []
        scores = [score for delta in piece.deltas for score in delta.scores]
        choice = CompletionChoice(
            index=piece.index,
            text=text,
            logprobs=_logprobs(scores) if scores else None,
            finish_reason=piece.finish_reason,
        )
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
        self._choices = {
            run.index: CompletionChoice(
                index=run.index, text="", logprobs=_logprobs([]) if job.with_logprobs else None
            )
            for run in job.runs
        }

    def add(self, chunks: Iterable[Completion]) -> None:
        """Take more chunks of the same answer."""
        for chunk in chunks:
            for choice in chunk.choices:
                whole = self._choices[choice.index]
                whole.text += choice.text
                if choice.logprobs is not None:
                    whole.logprobs = _joined(whole.logprobs, choice.logprobs)
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


def _logprobs(scores: list[TokenScore]) -> CompletionLogprobs:
    top = [_top(score) for score in scores]
    return CompletionLogprobs(
        tokens=[score.text for score in scores],
        token_logprobs=[score.logprob for score in scores],
        # null where no alternatives were asked for
        top_logprobs=top if any(score.top for score in scores) else None,
        text_offset=[score.offset for score in scores],
    )


def _top(score: TokenScore) -> dict[str, float]:
    """Return the alternatives by their text, the sampled token among them; of equal texts the best."""
    top: dict[str, float] = {}
    for piece, value in [*score.top, (score.piece, score.logprob)]:
        top.setdefault(piece.decode("utf-8", "replace"), value)
    return top


def _joined(whole: CompletionLogprobs | None, more: CompletionLogprobs) -> CompletionLogprobs:
    if whole is None or not whole.tokens:
        return more
    has_top = whole.top_logprobs is not None and more.top_logprobs is not None
    return CompletionLogprobs(
        tokens=whole.tokens + more.tokens,
        token_logprobs=whole.token_logprobs + more.token_logprobs,
        top_logprobs=(whole.top_logprobs or []) + (more.top_logprobs or []) if has_top else None,
        text_offset=whole.text_offset + more.text_offset,
    )
