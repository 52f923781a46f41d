"""Answers in token ids, of POST /v1/generate: the twin of `completions.py` for callers with their own tokenizer."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from rose.frontend.formatters.base import Delta
from rose.frontend.formatters.tokens import TokensDecoder
from rose.frontend.generation import ChoiceRun, Job, Piece
from rose.frontend.logprobs import LOWEST
from rose.frontend.sse import ChunkWriter
from rose.frontend.token_schemas import TokenChoice, TokenCompletion, TokenLogprobEntry
from rose.protocol.event import TokenLogprobs, TokensEvent


class TokenRun(ChoiceRun):
    """One choice in tokens; there is no text, so nothing is searched, hidden or held back."""

    def __init__(self, index: int) -> None:
        super().__init__(index, TokensDecoder())

    def take(self, event: TokensEvent) -> list[Delta]:
        """Take tokens; return them as they came."""
        self.num_output_tokens += len(event.token_ids)
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        scores = list(event.logprobs or ())
        return [Delta(kind="tokens", token_ids=event.token_ids, scores=scores)]

    def finish(self, reason: str) -> list[Delta]:
        """Take the engine's end."""
        self.finish_reason = reason
        return []


class TokenWriter(ChunkWriter):
    """Writes the chunks of one answer."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def chunks(self, piece: Piece) -> list[TokenCompletion]:
        """Return the chunk of one piece."""
        scores = [_entry(score) for delta in piece.deltas for score in delta.scores]
        choice = TokenChoice(
            index=piece.index,
            token_ids=[token_id for delta in piece.deltas for token_id in delta.token_ids],
            logprobs=scores if self._job.with_logprobs else None,
            finish_reason=piece.finish_reason,
        )
        return [self._new_chunk([choice])]

    def usage_chunk(self) -> TokenCompletion:
        """Return the chunk after the last choice: no choices, the usage."""
        chunk = self._new_chunk([])
        chunk.usage = self._job.usage()
        return chunk

    def _new_chunk(self, choices: list[TokenChoice]) -> TokenCompletion:
        return TokenCompletion(
            id=self._job.answer_id,
            created=self._job.created,
            model=self._job.model,
            choices=choices,
            usage=None if self._job.with_usage else UNSET,
        )


class TokenFold:
    """Adds chunks up to a whole answer."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._choices = [
            TokenChoice(index=run.index, token_ids=[], logprobs=[] if job.with_logprobs else None)
            for run in job.runs
        ]

    def add(self, chunks: Iterable[TokenCompletion]) -> None:
        """Take more chunks of the same answer."""
        for chunk in chunks:
            for choice in chunk.choices:
                whole = self._choices[choice.index]
                whole.token_ids += choice.token_ids
                if whole.logprobs is not None:
                    whole.logprobs += choice.logprobs or []
                whole.finish_reason = choice.finish_reason or whole.finish_reason

    def completion(self) -> TokenCompletion:
        """Return the answer; every choice has ended."""
        return TokenCompletion(
            id=self._job.answer_id,
            created=self._job.created,
            model=self._job.model,
            choices=self._choices,
            usage=self._job.usage(),
        )


def _entry(score: TokenLogprobs) -> TokenLogprobEntry:
    return TokenLogprobEntry(
        logprob=max(score.logprob, LOWEST),
        top_token_ids=score.top_ids,
        top_logprobs=[max(value, LOWEST) for value in score.top_logprobs],
    )
