"""What a formatter is: conversations to tokens, tokens back to pieces of an answer. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from msgspec import Struct

from rose.frontend.formatters.shape import AnswerRules, AnswerShape
from rose.protocol.grammar import Vocabulary
from rose.utils.errors import RoseError

FINISH_LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """What the engine needs of a conversation."""

    token_ids: list[int]
    stop_token_ids: list[int]
    declared_tools: list[str] = field(default_factory=list)
    """Names of the functions that the conversation offers; give them to `Formatter.decoder`."""


@dataclass(slots=True)
class ContentSpan:
    """A sampled token that became content: its place among the tokens pushed, and the characters it brought.

    Characters count all content so far; a token that ends inside a character brings it with the next token.
    """

    ordinal: int
    start: int
    end: int


DeltaKind = Literal[
    "content",
    "reasoning",
    "tool_call",
    "tool_arguments",
    "tokens",
    "message",
    "message_text",
    "item",
]


class Delta(Struct, kw_only=True):
    """A piece of an answer, in the order in which it was written.

    content, reasoning: `text` continues that stream. tool_call: a call of `name` begins, with place `index`;
    tool_arguments: `text` continues the arguments of call `index`. tokens: `token_ids` continue an answer
    that has no text (formatter `tokens` only). Where the decoder reveals messages, they come besides: message:
    message number `index` begins with `header`; message_text: `text` continues it. Where it keeps messages apart:
    item: message number `index` begins, what follows belongs to it; `name` is reasoning, commentary, final or call.
    """

    kind: DeltaKind
    text: str = ""
    index: int = 0
    name: str = ""
    token_ids: list[int] = []
    header: ParsedMessage | None = None
    """Of a message that begins; its content is empty."""
    scores: list[Any] = []
    """Log-probabilities of the tokens of this content (`logprobs.TokenScore`); decoders leave it empty."""


@dataclass(slots=True, kw_only=True)
class ParsedMessage:
    """One message of an answer as the format has it."""

    channel: str | None
    recipient: str | None
    content_type: str | None
    content: str
    role: str = "assistant"
    name: str | None = None
    """Of a tool whose answer the model made up."""
    token_ids: list[int] | None = None
    """What was sampled for it, in the form in which a later prompt can repeat it; None where that is not sure, and
    where the decoder does not keep messages apart."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """A whole answer, seen as chat."""

    content: str | None
    """None: no message for the user was begun."""
    reasoning: str | None
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    """Each with name and arguments (a string, as the model wrote it)."""
    finish_reason: str = "stop"
    """stop, tool_calls or length."""
    messages: list[ParsedMessage] = field(default_factory=list)
    num_reasoning_tokens: int = 0
    recoveries: list[str] = field(default_factory=list)
    """Kinds of malformed output that were met and read leniently, in order; for metrics."""
    token_ids: list[int] = field(default_factory=list)
    """The answer of formatter `tokens`; empty for the others."""


class AnswerDecoder(Protocol):
    """Incremental parser of one answer. Total: never raises, never loses text."""

    def track(self) -> list[ContentSpan]:
        """Begin to note which tokens become content; call before the first push.

        Returns  a list that grows with every push. Text that is no token's, such as what parts two messages, and
                 text saved out of a broken header have no span.
        """
        ...

    def reveal(self) -> None:
        """Begin to return messages as the model writes them, headers included, beside the answer; call before the
        first push. Formats without messages return nothing more."""
        ...

    def separate(self) -> None:
        """Begin to keep messages apart: an `item` delta begins each, no blank line parts their texts, and the
        messages of the answer have their tokens; call before the first push. Formats without messages return
        nothing more."""
        ...

    def push(self, token_ids: Sequence[int]) -> list[Delta]:
        """Take sampled tokens, any number at a time; the cut into pushes does not change the answer."""
        ...

    def plain(self, token_ids: Sequence[int]) -> list[str]:
        """Take tokens as long as all they do is to continue the text that was last returned; return what each adds.

        The others were not taken, `push` must take the next one. The short way for nearly every token: `push` would
        have returned one delta with this text, of the kind that `continues` names. A decoder need not have a short way.
        """
        ...

    @property
    def continues(self) -> tuple[DeltaKind, int]:
        """Return kind and index of the delta that `plain` has just left out."""
        ...

    def finish(self, reason: str) -> list[Delta]:
        """Take the end (stop, length or abort); return what was held back."""
        ...

    def answer(self) -> Answer:
        """Return everything so far; after `finish` it is final."""
        ...


class Formatter(Protocol):
    """One prompt format.

    `conversation` is a parsed request body with more fields, all optional: `api` (chat, the default, or
    responses) says whose body it is, `conversation_date` (YYYY-MM-DD) is the day the prompt names; without it
    the prompt names no day; `call_header` (recipient_first, the default, or channel_first) is the form of calls that
    the prompt repeats. The formatters `plain` and `tokens` read `prompt` only.
    """

    name: str
    has_grammars: bool
    """Whether answers can be held to a form."""

    def encode(self, conversation: dict[str, Any]) -> EncodedPrompt:
        """Render a conversation to a prompt.

        Raises  FormatError with what was asked, found, allowed and what to do.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, of a control token its name."""
        ...

    def vocabulary(self) -> Vocabulary:
        """Return the tokens that grammars of this format are written for.

        Raises   FormatError where the format has no grammars
        """
        ...

    def rules(self, shape: AnswerShape) -> AnswerRules | None:
        """Return the grammars that hold an answer to a shape, None where the shape asks for nothing.

        Raises   FormatError where the format has no grammars
        """
        ...

    def decoder(self, *, declared_tools: Sequence[str] = ()) -> AnswerDecoder:
        """Return a parser for one answer; `declared_tools` are those of the encoded prompt."""
        ...


class WithoutGrammars:
    """The part of a formatter that has no grammars: any answer is as good as another."""

    name: str
    has_grammars = False

    def vocabulary(self) -> Vocabulary:
        """Refuse."""
        raise self._refusal()

    def rules(self, shape: AnswerShape) -> AnswerRules | None:
        """Refuse every shape that asks for something."""
        if shape.is_free:
            return None
        raise self._refusal()

    def _refusal(self) -> FormatError:
        return FormatError(
            f"formatter {self.name} cannot hold an answer to a form (response_format, tool_choice, strict); "
            "allowed: formatter harmony; change --formatter or the request"
        )


class FormatError(RoseError):
    """A conversation that cannot be rendered; `param` names the field of the body."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
