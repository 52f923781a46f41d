"""Sampled token ids to Harmony messages, one token at a time.

A total function: no sequence of ids raises and none loses text. Well-formed output is read as the format defines it;
what models write besides is read as docs/harmony.md says. Knows nothing of chat; `answer.py` shows messages as chat.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from rose.frontend.formatters.harmony.header import (
    Header,
    Section,
    SectionKind,
    is_recognised,
    read_header,
    salvage,
)
from rose.frontend.formatters.harmony.tokens import harmony_tokens
from rose.frontend.tokenizer import TextDecoder, Tokenizer, plain_texts

HEADER_TOKENS = 128
"""Longest header; past it the words are read as the message (a guess: real headers have under 40)."""
INNER_HEADER_TOKENS = 64
"""How far to look whether a control token inside a message begins the next one."""


@dataclass(slots=True, kw_only=True)
class MessageText:
    """A message as far as it was read."""

    header: Header
    pieces: list[str] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens of the content, the header and the terminator left out."""
    is_only_header: bool = False
    """The message ended inside its header, and not as a call ends."""

    @property
    def text(self) -> str:
        """Return the content so far."""
        return "".join(self.pieces)


class Event(Struct, frozen=True):
    """What a token brought: a message began, went on (with text, or a control token's name), or ended.

    token: the content takes token number `ordinal`; only where the parser is told to say so.
    """

    kind: Literal["begin", "text", "markup", "end", "token"]
    message: MessageText
    text: str = ""
    ordinal: int = -1


class _Sections:
    """A header while it is being collected."""

    def __init__(self, *, is_explicit: bool) -> None:
        self.is_explicit = is_explicit
        self.num_tokens = 0
        self._parts: list[tuple[SectionKind, list[bytes]]] = [("role", [])]

    def add_text(self, piece: bytes) -> None:
        self.num_tokens += 1
        self._parts[-1][1].append(piece)

    def open(self, kind: SectionKind) -> None:
        self.num_tokens += 1
        self._parts.append((kind, []))

    def is_whole(self) -> bool:
        """Return whether the text does not end inside a character."""
        text = b"".join(self._parts[-1][1])
        return codecs.utf_8_decode(text, "replace", False)[1] == len(text)

    def read(self) -> list[Section]:
        return [(kind, b"".join(pieces).decode("utf-8", "replace")) for kind, pieces in self._parts]


class HarmonyParser:
    """Parser of one answer: what follows `<|start|>assistant`, that beginning repeated or not."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens = harmony_tokens(tokenizer)
        self._terminators = self._tokens.terminators
        self._kinds: dict[int, SectionKind] = {
            self._tokens.channel: "channel",
            self._tokens.constrain: "constrain",
        }
        self._text = TextDecoder()
        self._plain_texts = plain_texts(tokenizer)
        self._header: _Sections | None = _Sections(is_explicit=False)
        self._held: list[int] = []  # tokens inside a message that may begin the next one
        self._message: MessageText | None = None
        self.messages: list[MessageText] = []
        self.recoveries: list[str] = []
        self.tells_tokens = False
        """Whether a `token` event comes before the text of each token of a message's content."""
        self._ordinal = -1

    def push(self, token_ids: Iterable[int]) -> list[Event]:
        """Take tokens; return what they brought."""
        events: list[Event] = []
        for token_id in token_ids:
            self._ordinal += 1
            self._push(token_id, events)
        return events

    def plain(self, token_ids: Sequence[int]) -> list[str]:
        """Take tokens as long as all they do is to continue the open message; return their texts.

        The short way for nearly every token: the same as `push`, which would return one text event for each.
        """
        message = self._message
        if message is None or self._held or self._text.is_inside or self.tells_tokens:
            return []
        texts = self._plain_texts.of(token_ids)
        self._ordinal += len(texts)
        message.num_tokens += len(texts)
        message.pieces += texts
        return texts

    def finish(self) -> list[Event]:
        """Take the end; return what was held back. The parser takes no more tokens."""
        events: list[Event] = []
        self._ordinal += 1
        self._release(events)
        if self._message is not None:
            self._close(events)
        elif self._header is not None:
            self._salvage(events, terminator=None)
        return events

    def _push(self, token_id: int, events: list[Event]) -> None:
        if self._held:
            self._push_held(token_id, events)
        elif self._message is not None:
            self._push_content(token_id, events)
        elif self._header is not None:
            self._push_header(token_id, events)
        else:
            self._push_between(token_id, events)

    def _push_between(self, token_id: int, events: list[Event]) -> None:
        """Take a token between messages."""
        if token_id == self._tokens.start:
            self._header = _Sections(is_explicit=True)
        elif token_id in self._terminators or self._is_other_control(token_id):
            self.recoveries.append("stop_between_messages")
        else:
            self.recoveries.append("missing_start")
            self._header = _Sections(is_explicit=False)
            self._push_header(token_id, events)

    def _push_header(self, token_id: int, events: list[Event]) -> None:
        header = self._header
        assert header is not None, "the state is header"
        if token_id == self._tokens.message:
            self._begin(read_header(header.read(), is_explicit=header.is_explicit), events)
        elif token_id in self._terminators:
            self._salvage(events, terminator=token_id)
        elif token_id == self._tokens.start:
            self.recoveries.append("repeated_start")
            self._salvage(events, terminator=None)
            self._header = _Sections(is_explicit=True)
        else:
            self._collect(header, token_id)
            if header.num_tokens >= HEADER_TOKENS and header.is_whole():
                self._salvage(events, terminator=None, goes_on=True)

    def _collect(self, header: _Sections, token_id: int) -> None:
        if token_id in self._kinds:
            header.open(self._kinds[token_id])
        elif self._tokenizer.control_name(token_id) is not None:
            header.open("other")
        else:
            header.add_text(self._tokenizer.token_bytes(token_id))

    def _push_content(self, token_id: int, events: list[Event]) -> None:
        message = self._message
        assert message is not None, "the state is content"
        if token_id in self._terminators:
            self._close(events)
        elif token_id in (self._tokens.start, self._tokens.channel):
            self._held = [token_id]
        else:
            self._append(token_id, events, self._ordinal)

    def _append(self, token_id: int, events: list[Event], ordinal: int) -> None:
        """Add a token to the content: its text, or its name if it is a control token."""
        message = self._message
        assert message is not None, "the state is content"
        message.num_tokens += 1
        name = self._tokenizer.control_name(token_id)
        if name is not None:
            self._emit("text", self._text.finish(), events)
            self._emit("markup", name, events)
        else:
            if self.tells_tokens:
                events.append(Event("token", message, ordinal=ordinal))
            self._emit("text", self._text.push(self._tokenizer.token_bytes(token_id)), events)

    def _push_held(self, token_id: int, events: list[Event]) -> None:
        """Take a token after a control token inside a message: the next message, or content after all."""
        is_undecided = token_id not in self._terminators and token_id != self._tokens.start
        if token_id == self._tokens.message:
            self._decide_held(events)
        elif is_undecided and len(self._held) < INNER_HEADER_TOKENS:
            self._held.append(token_id)
        else:
            self._release(events)
            self._push_content(token_id, events)

    def _decide_held(self, events: list[Event]) -> None:
        is_explicit = self._held[0] == self._tokens.start
        header = _Sections(is_explicit=is_explicit)
        for token_id in self._held[1:] if is_explicit else self._held:
            self._collect(header, token_id)
        if is_recognised(header.read(), is_explicit=is_explicit):
            self._held = []
            self.recoveries.append("missing_end")
            self._close(events)
            self._begin(read_header(header.read(), is_explicit=is_explicit), events)
        else:
            self._release(events)
            self._append(self._tokens.message, events, self._ordinal)

    def _release(self, events: list[Event]) -> None:
        """Take held tokens as content."""
        held, self._held = self._held, []
        if held:
            self.recoveries.append("control_token_in_content")
        # The held tokens are those right before the current one.
        for ordinal, token_id in enumerate(held, start=self._ordinal - len(held)):
            self._append(token_id, events, ordinal)

    def _begin(
        self, header: Header, events: list[Event], *, is_only_header: bool = False
    ) -> MessageText:
        if header.is_odd:
            self.recoveries.append("odd_header")
        message = MessageText(header=header, is_only_header=is_only_header)
        self._header, self._message = None, message
        self.messages.append(message)
        events.append(Event("begin", message))
        return message

    def _close(self, events: list[Event]) -> None:
        assert self._message is not None, "the state is content"
        self._emit("text", self._text.finish(), events)
        events.append(Event("end", self._message))
        self._message = None

    def _salvage(
        self, events: list[Event], *, terminator: int | None, goes_on: bool = False
    ) -> None:
        """Make a message of a header that never reached `<|message|>`; with `goes_on`, only its beginning."""
        collected, self._header = self._header, None
        assert collected is not None, "the state is header"
        header, text = salvage(collected.read(), is_explicit=collected.is_explicit)
        is_named = (header.channel or header.recipient or header.name) is not None
        if not goes_on and not is_named and not text.strip():
            return
        self.recoveries.append("missing_message")
        is_only_header = not text and not goes_on and terminator != self._tokens.call
        message = self._begin(header, events, is_only_header=is_only_header)
        message.num_tokens = collected.num_tokens if text else 0
        self._emit("text", text, events)
        if not goes_on:
            self._close(events)

    def _emit(self, kind: Literal["text", "markup"], text: str, events: list[Event]) -> None:
        if text and self._message is not None:
            self._message.pieces.append(text)
            events.append(Event(kind, self._message, text))

    def _is_other_control(self, token_id: int) -> bool:
        is_header = token_id in (self._tokens.channel, self._tokens.constrain, self._tokens.message)
        return not is_header and self._tokenizer.control_name(token_id) is not None


def parse(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[MessageText]:
    """Return the messages of a whole answer."""
    parser = HarmonyParser(tokenizer)
    parser.push(token_ids)
    parser.finish()
    return parser.messages
