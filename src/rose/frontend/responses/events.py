"""Events of a streamed response, by the fields that they share; `type` says which one it is."""

from __future__ import annotations

from msgspec import Struct

from rose.frontend.responses.schemas import OutputItem, ReasoningPart, ResponseBody, TextPart
from rose.frontend.schemas import TokenLogprob, encode


class Event(Struct, kw_only=True):
    """What every event has."""

    type: str
    sequence_number: int
    """From 0, without a gap."""


class ResponseEvent(Event, kw_only=True):
    """response.created, queued, in_progress, completed, incomplete, failed."""

    response: ResponseBody


class ItemEvent(Event, kw_only=True):
    """response.output_item.added, done."""

    output_index: int
    item: OutputItem


class PartEvent(Event, kw_only=True):
    """response.content_part.added, done."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: TextPart | ReasoningPart


class TextDelta(Event, kw_only=True):
    """response.output_text.delta."""

    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(Event, kw_only=True):
    """response.output_text.done."""

    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(Event, kw_only=True):
    """response.reasoning_text.delta."""

    item_id: str
    output_index: int
    content_index: int = 0
    delta: str


class ReasoningDone(Event, kw_only=True):
    """response.reasoning_text.done."""

    item_id: str
    output_index: int
    content_index: int = 0
    text: str


class SummaryPartEvent(Event, kw_only=True):
    """response.reasoning_summary_part.added, done."""

    item_id: str
    output_index: int
    summary_index: int = 0
    part: ReasoningPart


class SummaryDelta(Event, kw_only=True):
    """response.reasoning_summary_text.delta."""

    item_id: str
    output_index: int
    summary_index: int = 0
    delta: str


class SummaryDone(Event, kw_only=True):
    """response.reasoning_summary_text.done."""

    item_id: str
    output_index: int
    summary_index: int = 0
    text: str


class ArgumentsDelta(Event, kw_only=True):
    """response.function_call_arguments.delta."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, kw_only=True):
    """response.function_call_arguments.done."""

    item_id: str
    output_index: int
    name: str
    arguments: str


def sse(event: Event) -> bytes:
    """Return an event as a server-sent one, named by its type."""
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), encode(event))
