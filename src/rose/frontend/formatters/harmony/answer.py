"""A Harmony answer as chat: content, reasoning and tool calls, streamed and whole alike.

The recipient decides before the channel: a message to a function is a call on whatever channel. Otherwise analysis
is reasoning, and commentary (a preamble) and final are content. Names of control tokens never reach the client.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rose.frontend.formatters.base import (
    FINISH_LENGTH,
    Answer,
    ContentSpan,
    Delta,
    DeltaKind,
    ParsedMessage,
)
from rose.frontend.formatters.harmony.builtin_tools import is_builtin
from rose.frontend.formatters.harmony.messages import FUNCTIONS
from rose.frontend.formatters.harmony.parse import Event, HarmonyParser, MessageText
from rose.frontend.formatters.harmony.sampled import message_tokens
from rose.frontend.formatters.harmony.tokens import harmony_tokens
from rose.frontend.tokenizer import Tokenizer

SEPARATOR = "\n\n"
"""Between two messages of one kind, so that a preamble and the answer do not run together."""
Stream = Literal["content", "reasoning"]


@dataclass(slots=True)
class _Call:
    name: str
    pieces: list[str] = field(default_factory=list)


class HarmonyDecoder:
    """Decoder of one answer; see `AnswerDecoder`."""

    def __init__(self, tokenizer: Tokenizer, declared_tools: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._parser = HarmonyParser(tokenizer)
        self._declared = frozenset(declared_tools)
        self._texts: dict[Stream, list[str]] = {"content": [], "reasoning": []}
        self._has_content = False
        self._calls: list[_Call] = []
        self._target: Stream | _Call = "content"
        self.continues: tuple[DeltaKind, int] = ("content", 0)
        """What a plain token continues."""
        self._written = self._texts["content"]
        """Where text of the open message goes."""
        self._is_first_text = True
        self._reason = "stop"
        self._spans: list[ContentSpan] = []
        self._open_span: ContentSpan | None = None
        self._reveals = False
        self._token_ids: list[int] | None = None
        """What was sampled, where messages are kept apart."""
        self._num_messages = 0
        self._num_characters = 0
        """Of content, what parts messages included."""

    def track(self) -> list[ContentSpan]:
        """Begin to note which tokens become content."""
        self._parser.tells_tokens = True
        return self._spans

    def reveal(self) -> None:
        """Begin to return the messages as they are written."""
        self._reveals = True

    def separate(self) -> None:
        """Begin to keep the messages apart."""
        self._token_ids = []

    def push(self, token_ids: Sequence[int]) -> list[Delta]:
        """Take sampled tokens."""
        if self._token_ids is not None:
            self._token_ids += token_ids
        return self._deltas(self._parser.push(token_ids))

    def plain(self, token_ids: Sequence[int]) -> list[str]:
        """Take tokens as long as all they do is to continue an answer."""
        if self._is_first_text or self._reveals:
            return []
        texts = self._parser.plain(token_ids)
        if self._token_ids is not None:
            self._token_ids += token_ids[: len(texts)]
        self._written += texts  # spans count characters; where there are any, no token is plain
        return texts

    def finish(self, reason: str) -> list[Delta]:
        """Take the end; return what was held back."""
        self._reason = reason
        return self._deltas(self._parser.finish())

    def answer(self) -> Answer:
        """Return everything so far."""
        content, reasoning = ("".join(self._texts[s]) for s in ("content", "reasoning"))
        reason = "tool_calls" if self._calls else "stop"
        messages = self._parser.messages
        return Answer(
            content=content if self._has_content else None,
            reasoning=reasoning or None,
            tool_calls=[{"name": c.name, "arguments": "".join(c.pieces)} for c in self._calls],
            finish_reason=FINISH_LENGTH if self._reason == FINISH_LENGTH else reason,
            messages=self._messages(),
            num_reasoning_tokens=sum(
                m.num_tokens for m in messages if route(m, self._declared) == "reasoning"
            ),
            recoveries=list(self._parser.recoveries),
        )

    def _messages(self) -> list[ParsedMessage]:
        messages = [_parsed(message) for message in self._parser.messages]
        if self._token_ids is None or self._parser.recoveries:
            return messages
        assistant = self._tokenizer.encode("assistant")
        parts = message_tokens(self._token_ids, harmony_tokens(self._tokenizer), assistant)
        if len(parts) == len(messages):
            for message, part in zip(messages, parts, strict=True):
                message.token_ids = part
        return messages

    def _deltas(self, events: Sequence[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            if event.kind == "begin":
                self._num_messages += 1
            if self._reveals:
                self._reveal(event, deltas)
            if event.kind == "begin":
                self._begin(event.message, deltas)
            elif event.kind == "text":
                _append(deltas, self._add(event.text))
            elif event.kind == "token" and self._target == "content":
                self._begin_span(event.ordinal)
        return deltas

    def _reveal(self, event: Event, deltas: list[Delta]) -> None:
        if event.kind == "begin":
            header = _parsed(event.message)
            header.content = ""
            deltas.append(Delta(kind="message", index=self._num_messages - 1, header=header))
        elif event.kind in ("text", "markup"):
            index = self._num_messages - 1
            _append(deltas, Delta(kind="message_text", text=event.text, index=index))

    def _begin(self, message: MessageText, deltas: list[Delta]) -> None:
        self._is_first_text = True
        self._open_span = None
        kind = route(message, self._declared)
        if self._token_ids is not None:
            name = _phase(message) if kind == "content" else kind
            deltas.append(Delta(kind="item", index=self._num_messages - 1, name=name))
        if kind == "call":
            name = call_name(message, self._declared) or ""
            self._target = _Call(name)
            self._written = self._target.pieces
            self.continues = ("tool_arguments", len(self._calls))
            self._calls.append(self._target)
            deltas.append(Delta(kind="tool_call", index=len(self._calls) - 1, name=name))
        else:
            self._target = kind
            self._written = self._texts[kind]
            self.continues = (kind, 0)
            self._has_content |= kind == "content"

    def _add(self, text: str) -> Delta:
        """Take text of the open message; return what it is to the client."""
        target = self._target
        if isinstance(target, _Call):
            self._is_first_text = False
            target.pieces.append(text)
            return Delta(kind="tool_arguments", text=text, index=len(self._calls) - 1)
        written = self._texts[target]
        if self._is_first_text and written:
            text = self._separator + text
        self._is_first_text = False
        written.append(text)
        if target == "content":
            self._num_characters += len(text)
            if self._open_span is not None:
                self._open_span.end = self._num_characters
        return Delta(kind=target, text=text)

    @property
    def _separator(self) -> str:
        return SEPARATOR if self._token_ids is None else ""

    def _begin_span(self, ordinal: int) -> None:
        start = self._num_characters
        if self._is_first_text and self._texts["content"]:
            start += len(self._separator)
        self._open_span = ContentSpan(ordinal, start, start)
        self._spans.append(self._open_span)


def route(
    message: MessageText, declared: Collection[str]
) -> Literal["content", "reasoning", "call"]:
    """Return where a message belongs in chat."""
    header = message.header
    if call_name(message, declared) is not None:
        return "call"
    if header.role != "assistant":
        return "reasoning"  # a turn of another that the model made up: kept, but not as its answer
    if header.recipient is not None and is_builtin(header.recipient):
        return "reasoning"  # code and searches that nobody runs here are thoughts
    is_analysis = (header.channel or "").casefold().startswith("analysis")
    return "reasoning" if is_analysis else "content"


def _phase(message: MessageText) -> str:
    """Return what a message for the user is: a commentary on the way, or the final answer."""
    is_preamble = (message.header.channel or "").casefold().startswith("commentary")
    return "commentary" if is_preamble else "final"


def call_name(message: MessageText, declared: Collection[str]) -> str | None:
    """Return the name of the function that a message calls, None when it calls none."""
    recipient = message.header.recipient
    if recipient is None or message.header.role != "assistant" or message.is_only_header:
        return None
    if recipient in declared:
        return recipient
    return recipient.removeprefix(f"{FUNCTIONS}.") if _is_function(recipient) else None


def _is_function(recipient: str) -> bool:
    return recipient.startswith(f"{FUNCTIONS}.") and recipient != f"{FUNCTIONS}."


def _append(deltas: list[Delta], delta: Delta) -> None:
    """Add a delta, as part of the one before where that is the same stream."""
    last = deltas[-1] if deltas else None
    if last is not None and (last.kind, last.index) == (delta.kind, delta.index):
        last.text += delta.text
    else:
        deltas.append(delta)


def _parsed(message: MessageText) -> ParsedMessage:
    header = message.header
    return ParsedMessage(
        channel=header.channel,
        recipient=header.recipient,
        content_type=header.content_type,
        content=message.text,
        role=header.role,
        name=header.name,
    )
