"""The identity: token ids in, token ids out; for callers that have their own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rose.frontend.formatters.base import (
    FINISH_LENGTH,
    Answer,
    ContentSpan,
    Delta,
    DeltaKind,
    EncodedPrompt,
    WithoutGrammars,
)
from rose.frontend.formatters.plain import read_ids


class TokensFormatter(WithoutGrammars):
    """`prompt` is a list of token ids; the caller says in its request where to stop."""

    name = "tokens"

    def encode(self, conversation: dict[str, Any]) -> EncodedPrompt:
        """Pass the token ids of `prompt` on."""
        token_ids = read_ids(conversation.get("prompt"), "a list of token ids")
        return EncodedPrompt(token_ids=token_ids, stop_token_ids=[])

    def token_bytes(self, token_id: int) -> bytes:
        """Return nothing: this formatter has no vocabulary."""
        return b""

    def decoder(self, *, declared_tools: Sequence[str] = ()) -> TokensDecoder:
        """Return a decoder that passes token ids on; `declared_tools` play no part."""
        return TokensDecoder()


class TokensDecoder:
    """Decoder of one token sequence; see `AnswerDecoder`."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._reason = "stop"

    def track(self) -> list[ContentSpan]:
        """Return no spans: there is no text."""
        return []

    def reveal(self) -> None:
        """Do nothing: tokens are not read as messages."""

    def separate(self) -> None:
        """Do nothing: tokens are not read as messages."""

    def push(self, token_ids: Sequence[int]) -> list[Delta]:
        """Take sampled tokens."""
        self._token_ids += token_ids
        return [Delta(kind="tokens", token_ids=list(token_ids))] if token_ids else []

    def plain(self, token_ids: Sequence[int]) -> list[str]:
        """Take nothing: there is no text."""
        return []

    @property
    def continues(self) -> tuple[DeltaKind, int]:
        """Return what `push` returns."""
        return "tokens", 0

    def finish(self, reason: str) -> list[Delta]:
        """Take the end; nothing is held back."""
        self._reason = reason
        return []

    def answer(self) -> Answer:
        """Return everything so far."""
        reason = FINISH_LENGTH if self._reason == FINISH_LENGTH else "stop"
        return Answer(
            content=None, reasoning=None, finish_reason=reason, token_ids=list(self._token_ids)
        )
