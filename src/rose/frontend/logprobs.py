"""Log-probabilities of the tokens that make up an answer's content, sent with the text they belong to.

The decoder says which tokens became content and which characters; a token is sent once its characters are. Where a
stop string cuts a token, the token is sent whole; tokens after the cut are not sent. Knows no API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rose.frontend.formatters.base import ContentSpan
from rose.protocol.event import TokenLogprobs

LOWEST = -9999.0
"""Sent for anything below, as OpenAI does; JSON has no minus infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScore:
    """One token of the content."""

    piece: bytes
    """A control token's name, where one is among the alternatives."""
    logprob: float
    offset: int
    """Of its first character in the content."""
    top: list[tuple[bytes, float]]

    @property
    def text(self) -> str:
        """Return the token as text; bytes that are no characters by themselves are U+FFFD."""
        return self.piece.decode("utf-8", "replace")


class ContentLogprobs:
    """Follows one answer token by token."""

    def __init__(self, spans: Sequence[ContentSpan], token_bytes: Callable[[int], bytes]) -> None:
        self._spans = spans
        self._token_bytes = token_bytes
        self._taken: list[tuple[int, TokenLogprobs]] = []
        self._shifts: list[int] = []
        """Per span: characters of the sent content before it that the decoder does not count as content."""
        self._num_foreign = 0
        self._num_sent = 0
        self._next = 0

    def take(self, token_id: int, entry: TokenLogprobs) -> None:
        """Take the next sampled token, before the decoder does."""
        self._taken.append((token_id, entry))

    def follow(self, *, num_foreign: int, num_sent: int) -> None:
        """Take the characters that the token brought: of other streams shown as content, and sent as content."""
        self._shifts += [self._num_foreign] * (len(self._spans) - len(self._shifts))
        self._num_foreign += num_foreign
        self._num_sent += num_sent

    def ready(self, *, is_end: bool) -> list[TokenScore]:
        """Return the tokens whose text was sent since the last call; at the end also those that were cut."""
        scores = []
        while self._next < len(self._shifts):
            span, shift = self._spans[self._next], self._shifts[self._next]
            if span.start + shift >= self._num_sent:
                break
            if span.end + shift > self._num_sent and not is_end:
                break
            scores.append(self._score(span, shift))
            self._next += 1
        return scores

    def _score(self, span: ContentSpan, shift: int) -> TokenScore:
        token_id, entry = self._taken[span.ordinal]
        pairs: Iterable[tuple[int, float]] = zip(entry.top_ids, entry.top_logprobs, strict=True)
        return TokenScore(
            piece=self._token_bytes(token_id),
            logprob=max(entry.logprob, LOWEST),
            offset=span.start + shift,
            top=[(self._token_bytes(i), max(value, LOWEST)) for i, value in pairs],
        )
