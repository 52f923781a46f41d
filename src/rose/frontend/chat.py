"""Pieces of an answer as chat-completion chunks, and chunks folded into a whole answer.

A whole answer is made from the same chunks that a stream would have sent, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from rose.frontend.formatters.base import Delta
from rose.frontend.generation import Job, Piece, new_id
from rose.frontend.logprobs import TokenScore
from rose.frontend.schemas import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionPiece,
    RawMessagePiece,
    TokenLogprob,
    ToolCall,
    ToolCallPiece,
    TopLogprob,
)
from rose.frontend.sse import ChunkWriter


class ChatWriter(ChunkWriter):
    """Writes the chunks of one chat answer."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._begun: set[int] = set()

    def chunks(self, piece: Piece) -> list[ChatChunk]:
        """Return the chunks of one piece; the first of a choice carries the role."""
        written = self._role(piece.index)
        for delta in piece.deltas:
            logprobs = _logprobs(delta.scores)
            written.append(self._chunk(piece.index, _change(delta), logprobs=logprobs))
        if piece.finish_reason is not None:
            written.append(self._chunk(piece.index, ChatDelta(), piece.finish_reason))
        return written

    def usage_chunk(self) -> ChatChunk:
        """Return the chunk after the last choice: no choices, the usage."""
        chunk = self._new_chunk([])
        chunk.usage = self._job.usage()
        return chunk

    def _role(self, index: int) -> list[ChatChunk]:
        if index in self._begun:
            return []
        self._begun.add(index)
        return [self._chunk(index, ChatDelta(role="assistant", content=""))]

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        finish: str | None = None,
        *,
        logprobs: ChatLogprobs | None = None,
    ) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)
        return self._new_chunk([choice])

    def _new_chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self._job.answer_id,
            created=self._job.created,
            model=self._job.model,
            choices=choices,
            # OpenAI sends null on every other chunk where usage was asked for.
            usage=None if self._job.with_usage else UNSET,
        )


def _change(delta: Delta) -> ChatDelta:
    if delta.kind == "content":
        return ChatDelta(content=delta.text)
    if delta.kind == "reasoning":
        return ChatDelta(reasoning=delta.text, reasoning_content=delta.text)
    if delta.kind in ("message", "message_text"):
        return ChatDelta(raw_messages=[_raw_piece(delta)])
    if delta.kind == "tool_call":
        function = FunctionPiece(name=delta.name, arguments="")
        call_id = new_id("call_")
        piece = ToolCallPiece(index=delta.index, id=call_id, type="function", function=function)
        return ChatDelta(tool_calls=[piece])
    piece = ToolCallPiece(index=delta.index, function=FunctionPiece(arguments=delta.text))
    return ChatDelta(tool_calls=[piece])


def _raw_piece(delta: Delta) -> RawMessagePiece:
    header = delta.header
    if header is None:
        return RawMessagePiece(index=delta.index, content=delta.text)
    return RawMessagePiece(
        index=delta.index,
        role=header.role,
        name=header.name,
        channel=header.channel,
        recipient=header.recipient,
        content_type=header.content_type,
    )


class ChatFold:
    """Adds chunks up to a whole answer."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._messages = {run.index: ChatMessage() for run in job.runs}
        self._reasons: dict[int, str] = {}
        self._logprobs = {
            run.index: ChatLogprobs(content=[]) if job.with_logprobs else None for run in job.runs
        }

    def add(self, chunks: Iterable[ChatChunk]) -> None:
        """Take more chunks of the same answer."""
        for chunk in chunks:
            for choice in chunk.choices:
                _add_delta(self._messages[choice.index], choice.delta)
                whole = self._logprobs[choice.index]
                if choice.logprobs is not None and whole is not None:
                    whole.content += choice.logprobs.content
                if choice.finish_reason is not None:
                    self._reasons[choice.index] = choice.finish_reason

    def completion(self) -> ChatCompletion:
        """Return the answer; every choice has ended."""
        choices = [
            ChatChoice(
                index=index,
                message=message,
                logprobs=self._logprobs[index],
                finish_reason=self._reasons[index],
            )
            for index, message in sorted(self._messages.items())
        ]
        return ChatCompletion(
            id=self._job.answer_id,
            created=self._job.created,
            model=self._job.model,
            choices=choices,
            usage=self._job.usage(),
        )


def token_logprobs(scores: list[TokenScore]) -> list[TokenLogprob]:
    """Return log-probabilities as both chat completions and Responses write them."""
    return [
        TokenLogprob(
            token=score.text,
            logprob=score.logprob,
            bytes=list(score.piece),
            top_logprobs=[
                TopLogprob(token=p.decode("utf-8", "replace"), logprob=value, bytes=list(p))
                for p, value in score.top
            ],
        )
        for score in scores
    ]


def _logprobs(scores: list[TokenScore]) -> ChatLogprobs | None:
    return ChatLogprobs(content=token_logprobs(scores)) if scores else None


def _add_delta(message: ChatMessage, delta: ChatDelta) -> None:
    if delta.content:
        message.content = (message.content or "") + delta.content
    if delta.reasoning is not UNSET:
        text = ("" if message.reasoning is UNSET else message.reasoning) + delta.reasoning
        message.reasoning = message.reasoning_content = text
    if delta.raw_messages is not UNSET:
        _add_raw(message, delta.raw_messages)
    if delta.tool_calls is UNSET:
        return
    calls = [] if message.tool_calls is UNSET else message.tool_calls
    for piece in delta.tool_calls:
        if piece.id is not UNSET:
            name = "" if piece.function.name is UNSET else piece.function.name
            calls.append(ToolCall(id=piece.id, function=CalledFunction(name=name, arguments="")))
        calls[piece.index].function.arguments += piece.function.arguments
    message.tool_calls = calls


def _add_raw(message: ChatMessage, pieces: list[RawMessagePiece]) -> None:
    whole = [] if message.raw_messages is UNSET else message.raw_messages
    for piece in pieces:
        if piece.index == len(whole):
            whole.append(piece)
        else:
            whole[piece.index].content += piece.content
    message.raw_messages = whole
