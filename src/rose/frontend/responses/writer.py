"""Pieces of an answer as the events of a response, in OpenAI's order; the whole response is what the events add up to.

Each message of the answer is an item of its own. An item is added when its first text comes, closed when the next
one begins or the answer ends. Knows no HTTP and no store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec import UNSET, structs

from rose.frontend.chat import token_logprobs
from rose.frontend.errors import RequestError
from rose.frontend.formatters.base import Delta
from rose.frontend.generation import Job, Piece, new_id
from rose.frontend.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    ItemEvent,
    PartEvent,
    ReasoningDelta,
    ReasoningDone,
    ResponseEvent,
    SummaryDelta,
    SummaryDone,
    SummaryPartEvent,
    TextDelta,
    TextDone,
    sse,
)
from rose.frontend.responses.ids import item_id
from rose.frontend.responses.schemas import (
    CallItem,
    InputDetails,
    MessageItem,
    NamespaceTool,
    OutputDetails,
    OutputItem,
    ReasoningItem,
    ReasoningPart,
    ResponseBody,
    ResponseError,
    ResponseUsage,
    TextPart,
)
from rose.frontend.schemas import TokenLogprob, encode
from rose.frontend.sse import HOLE

PHASES = {"commentary": "commentary", "final": "final_answer"}
TEXT_DELTA = "response.output_text.delta"
REASONING_DELTA = "response.reasoning_text.delta"
ARGUMENTS_DELTA = "response.function_call_arguments.delta"
HOLE_NUMBER = 987_654_321
"""Stands in an example for the number to come."""
FINISHED = ("completed", "incomplete", "failed", "cancelled")
"""States that a response does not leave."""

Seal = Callable[[int], str | None]
"""Returns the encrypted reasoning of message number i of the answer."""


class ResponseWriter:
    """Writes the events of one response; `body` is the response as far as it has come."""

    def __init__(
        self,
        job: Job,
        body: ResponseBody,
        *,
        with_summary: bool = False,
        is_hidden: bool = False,
        seal: Seal | None = None,
    ) -> None:
        self.body = body
        self.places: list[int] = []
        """For each item of the output: which message of the answer it is."""
        self._job = job
        self._with_summary = with_summary and not is_hidden
        self._is_hidden = is_hidden
        self._seal = seal
        self._namespaces = {t.name for t in body.tools if isinstance(t, NamespaceTool)}
        self._sequence = 0
        self._next = ("final", 0)
        """Kind and number of the message that is being written."""
        self._item: OutputItem | None = None
        self._template: tuple[bytes, bytes, bytes] | None = None
        """A delta of the open item; see `plain`."""
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason: str | None = None

    def created(self) -> list[Event]:
        """Return the first events of a response; one in the background is queued then."""
        events = [self._response("response.created")]
        return [*events, self._response("response.queued")] if self.body.background else events

    def begun(self) -> list[Event]:
        """Return the event of the engine's first sign."""
        self.body.status = "in_progress"
        return [self._response("response.in_progress")]

    def events(self, piece: Piece) -> list[Event]:
        """Return the events of one piece."""
        events: list[Event] = []
        for delta in piece.deltas:
            self._take(delta, events)
        self._finish_reason = piece.finish_reason or self._finish_reason
        return events

    def plain(self, texts: list[str]) -> list[bytes]:
        """Return, each as server-sent events, texts that only continue the open item: what `events` would give.

        The short way for nearly every token: what every delta of an item repeats is encoded once.
        """
        if self._with_summary and isinstance(self._item, ReasoningItem):
            return [b"".join(map(sse, self._reasoning_deltas(text))) for text in texts]
        if self._template is None:
            self._template = self._cut_template()
        self._texts += texts
        head, middle, tail = self._template
        first = self._sequence
        self._sequence += len(texts)
        return [
            b"%b%d%b%b%b" % (head, number, middle, encode(text), tail)
            for number, text in enumerate(texts, first)
        ]

    def _cut_template(self) -> tuple[bytes, bytes, bytes]:
        """Return a delta of the open item, cut where its number and its text go."""
        if isinstance(self._item, MessageItem):
            where = self._where(TEXT_DELTA, number=HOLE_NUMBER)
            event = TextDelta(**where, delta=HOLE, logprobs=[])
        elif isinstance(self._item, ReasoningItem):
            where = self._where(REASONING_DELTA, number=HOLE_NUMBER)
            event = ReasoningDelta(**where, delta=HOLE)
        else:
            where = self._where(ARGUMENTS_DELTA, number=HOLE_NUMBER)
            event = ArgumentsDelta(**where, delta=HOLE)
        head, rest = sse(event).split(b"%d" % HOLE_NUMBER, 1)
        middle, tail = rest.split(encode(HOLE))
        return head, middle, tail

    def end(self) -> list[Event]:
        """End an answer whose last piece has come; return the events of its items. `last` has the very last one."""
        is_cut = self._finish_reason == "length"
        events = self._close("incomplete" if is_cut else "completed")
        if is_cut:
            self.body.incomplete_details = {"reason": "max_output_tokens"}
            self.body.status = "incomplete"
        else:
            self.body.status = "completed"
            self.body.completed_at = int(time.time())
        self.body.usage = usage_of(self._job)
        return events

    def fail(self, error: RequestError) -> list[Event]:
        """End an answer that broke off, as `end` does."""
        # OpenAI's codes of failed responses are not those of its errors.
        code = "rate_limit_exceeded" if error.kind.status == 429 else "server_error"
        self.body.error = ResponseError(code=code, message=error.message)
        return self._give_up("failed")

    def cancel(self) -> None:
        """End an answer that nobody wants any more; OpenAI has no event for it."""
        self._give_up("cancelled")

    def last(self) -> list[Event]:
        """Return the event that ends the stream."""
        return [self._response(f"response.{self.body.status}")]

    def _give_up(self, status: str) -> list[Event]:
        """What is open stays in the response as far as it came."""
        events = self._close("incomplete")
        self.body.status = status
        self.body.usage = usage_of(self._job)
        return events

    def _take(self, delta: Delta, events: list[Event]) -> None:
        if delta.kind == "item":
            events += self._close("completed")
            self._next = (delta.name, delta.index)
            if delta.name == "reasoning" and self._is_hidden:
                # Its text will not come, but that there is reasoning is no secret.
                events += self._open_reasoning()
        elif delta.kind == "content":
            if not isinstance(self._item, MessageItem):
                events += [*self._close("completed"), *self._open_message()]
            events.append(self._text_delta(delta))
        elif delta.kind == "reasoning":
            if not isinstance(self._item, ReasoningItem):
                events += [*self._close("completed"), *self._open_reasoning()]
            events += self._reasoning_deltas(delta.text)
        elif delta.kind == "tool_call":
            events += [*self._close("completed"), *self._open_call(delta.name)]
        elif delta.kind == "tool_arguments":
            self._texts.append(delta.text)
            events.append(ArgumentsDelta(**self._where(ARGUMENTS_DELTA), delta=delta.text))

    # ---- items begin ---------------------------------------------------------------------------------------

    def _open_message(self) -> list[Event]:
        phase = PHASES.get(self._next[0], "commentary")
        item = MessageItem(id=self._id("msg"), status="in_progress", phase=phase, content=[])
        part = TextPart(text="")
        return [self._add(item), PartEvent(**self._where("response.content_part.added"), part=part)]

    def _open_reasoning(self) -> list[Event]:
        item = ReasoningItem(id=self._id("rs"), status="in_progress", summary=[], content=[])
        events = [self._add(item)]
        if self._is_hidden:
            return events
        if self._with_summary:
            part = ReasoningPart(type="summary_text", text="")
            where = self._where("response.reasoning_summary_part.added")
            events.append(SummaryPartEvent(**where, part=part))
        part = ReasoningPart(type="reasoning_text", text="")
        return [*events, PartEvent(**self._where("response.content_part.added"), part=part)]

    def _open_call(self, name: str) -> list[Event]:
        namespace, dot, inner = name.partition(".")
        is_inside = bool(dot) and namespace in self._namespaces
        item = CallItem(
            id=self._id("fc"),
            status="in_progress",
            call_id=new_id("call_"),
            name=inner if is_inside else name,
            namespace=namespace if is_inside else UNSET,
            arguments="",
        )
        return [self._add(item)]

    def _add(self, item: OutputItem) -> Event:
        self._item = item
        self.body.output.append(item)
        self.places.append(self._next[1])
        # A copy: the item changes before the event is written out.
        return self._item_event("response.output_item.added", structs.replace(item))

    def _id(self, prefix: str) -> str:
        return item_id(prefix, self.body.id, len(self.body.output))

    # ---- items go on ---------------------------------------------------------------------------------------

    def _text_delta(self, delta: Delta) -> Event:
        logprobs = token_logprobs(delta.scores)
        self._texts.append(delta.text)
        self._logprobs += logprobs
        where = self._where(TEXT_DELTA)
        return TextDelta(**where, delta=delta.text, logprobs=logprobs)

    def _reasoning_deltas(self, text: str) -> list[Event]:
        self._texts.append(text)
        events: list[Event] = []
        if self._with_summary:
            where = self._where("response.reasoning_summary_text.delta")
            events.append(SummaryDelta(**where, delta=text))
        where = self._where(REASONING_DELTA)
        return [*events, ReasoningDelta(**where, delta=text)]

    # ---- items end -----------------------------------------------------------------------------------------

    def _close(self, status: str) -> list[Event]:
        item, text = self._item, "".join(self._texts)
        if item is None:
            return []
        events: list[Event]
        if isinstance(item, MessageItem):
            events = self._close_message(item, text)
        elif isinstance(item, ReasoningItem):
            events = self._close_reasoning(item, text)
        else:
            item.arguments = text
            kind = "response.function_call_arguments.done"
            events = [ArgumentsDone(**self._where(kind), name=item.name, arguments=text)]
        item.status = status
        events.append(self._item_event("response.output_item.done", item))
        self._item, self._texts, self._logprobs, self._template = None, [], [], None
        return events

    def _close_message(self, item: MessageItem, text: str) -> list[Event]:
        part = TextPart(text=text, logprobs=self._logprobs)
        item.content = [part]
        where = self._where("response.output_text.done")
        done = TextDone(**where, text=text, logprobs=self._logprobs)
        return [done, PartEvent(**self._where("response.content_part.done"), part=part)]

    def _close_reasoning(self, item: ReasoningItem, text: str) -> list[Event]:
        if self._seal is not None:
            item.encrypted_content = self._seal(self.places[-1])
        if self._is_hidden:
            return []
        part = ReasoningPart(type="reasoning_text", text=text)
        item.content = [part]
        events: list[Event] = [
            ReasoningDone(**self._where("response.reasoning_text.done"), text=text),
            PartEvent(**self._where("response.content_part.done"), part=part),
        ]
        if self._with_summary:
            summary = ReasoningPart(type="summary_text", text=text)
            item.summary = [summary]
            where = self._where("response.reasoning_summary_text.done")
            events.append(SummaryDone(**where, text=text))
            where = self._where("response.reasoning_summary_part.done")
            events.append(SummaryPartEvent(**where, part=summary))
        return events

    # ---- events --------------------------------------------------------------------------------------------

    def _number(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def _where(self, kind: str, *, number: int | None = None) -> dict[str, Any]:
        assert self._item is not None, "an item is open"
        return {
            "type": kind,
            "sequence_number": self._number() if number is None else number,
            "item_id": self._item.id,
            "output_index": len(self.body.output) - 1,
        }

    def _item_event(self, kind: str, item: OutputItem) -> Event:
        index = len(self.body.output) - 1
        return ItemEvent(type=kind, sequence_number=self._number(), output_index=index, item=item)

    def _response(self, kind: str) -> Event:
        body = structs.replace(self.body, output=list(self.body.output))
        return ResponseEvent(type=kind, sequence_number=self._number(), response=body)


def usage_of(job: Job) -> ResponseUsage:
    """Return the tokens of a response so far."""
    usage = job.usage()
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(
            reasoning_tokens=usage.completion_tokens_details.reasoning_tokens
        ),
        total_tokens=usage.total_tokens,
    )
