"""Raw text completion: the prompt is text as it stands, the answer is text as it comes."""

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
    FormatError,
    ParsedMessage,
    WithoutGrammars,
)
from rose.frontend.tokenizer import TextDecoder, Tokenizer, plain_texts, token_ids_of
from rose.utils.errors import CheckpointError

_ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")


class PlainFormatter(WithoutGrammars):
    """Text or token ids in, text out; control tokens in the answer are left out."""

    name = "plain"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, conversation: dict[str, Any]) -> EncodedPrompt:
        """Encode `prompt`, a string or a list of token ids."""
        prompt = conversation.get("prompt")
        if isinstance(prompt, str):
            token_ids = self._tokenizer.encode(prompt)
        else:
            token_ids = read_ids(prompt, "a string or a list of token ids")
        return EncodedPrompt(token_ids=token_ids, stop_token_ids=self._stops())

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        return self._tokenizer.token_bytes(token_id)

    def decoder(self, *, declared_tools: Sequence[str] = ()) -> PlainDecoder:
        """Return a decoder to text; plain text has no tool calls, so `declared_tools` play no part."""
        return PlainDecoder(self._tokenizer)

    def _stops(self) -> list[int]:
        found = []
        for name in _ENDS:
            try:
                found.append(self._tokenizer.control_id(name))
            except CheckpointError:
                continue  # a vocabulary need not have every end; max_tokens ends the request too
        return found


class PlainDecoder:
    """Decoder of one text; see `AnswerDecoder`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = TextDecoder()
        self._plain_texts = plain_texts(tokenizer)
        self._pieces: list[str] = []
        self._reason = "stop"
        self._spans: list[ContentSpan] | None = None
        self._num_tokens = self._num_characters = 0

    def track(self) -> list[ContentSpan]:
        """Begin to note which tokens become text."""
        self._spans = []
        return self._spans

    def reveal(self) -> None:
        """Do nothing: plain text has no messages."""

    def separate(self) -> None:
        """Do nothing: plain text has no messages."""

    def push(self, token_ids: Sequence[int]) -> list[Delta]:
        """Take sampled tokens."""
        pieces = []
        for token_id in token_ids:
            is_control = self._tokenizer.control_name(token_id) is not None
            if is_control:
                pieces.append(self._text.finish())
            else:
                pieces.append(self._text.push(self._tokenizer.token_bytes(token_id)))
            if self._spans is not None:
                self._note(self._spans, pieces[-1], is_control=is_control)
        return self._add("".join(pieces))

    def plain(self, token_ids: Sequence[int]) -> list[str]:
        """Take tokens that are whole characters."""
        if self._text.is_inside or self._spans is not None:
            return []
        texts = self._plain_texts.of(token_ids)
        self._pieces += texts
        return texts

    @property
    def continues(self) -> tuple[DeltaKind, int]:
        """Return that all is content."""
        return "content", 0

    def finish(self, reason: str) -> list[Delta]:
        """Take the end; return what was held back."""
        self._reason = reason
        return self._add(self._text.finish())

    def answer(self) -> Answer:
        """Return everything so far."""
        text = "".join(self._pieces)
        message = ParsedMessage(channel=None, recipient=None, content_type=None, content=text)
        reason = FINISH_LENGTH if self._reason == FINISH_LENGTH else "stop"
        return Answer(content=text, reasoning=None, finish_reason=reason, messages=[message])

    def _note(self, spans: list[ContentSpan], text: str, *, is_control: bool) -> None:
        start, end = self._num_characters, self._num_characters + len(text)
        if not is_control:
            spans.append(ContentSpan(self._num_tokens, start, end))
        elif spans:
            spans[-1].end = end  # what was left of a character
        self._num_tokens, self._num_characters = self._num_tokens + 1, end

    def _add(self, text: str) -> list[Delta]:
        if not text:
            return []
        self._pieces.append(text)
        return [Delta(kind="content", text=text)]


def read_ids(prompt: Any, allowed: str) -> list[int]:
    """Return a prompt given as token ids; raises FormatError when it is none, or is empty."""
    token_ids = token_ids_of(prompt) if isinstance(prompt, list) else None
    if not token_ids:
        shown = repr(prompt)[:80]
        raise FormatError(
            f"prompt: found {shown}; allowed: {allowed}; change prompt", param="prompt"
        )
    return token_ids
