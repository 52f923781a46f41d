"""One response from its request to its record: the prompt, the engine's job, the events, what is kept.

In the foreground its events go to one client as they come; `background.py` runs it for nobody in particular. Knows
the store and the engine's client, no HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from rose.frontend.client import EngineClient
from rose.frontend.errors import RequestError
from rose.frontend.generation import ChoiceRun, Job, Piece, pieces
from rose.frontend.metrics import Metrics
from rose.frontend.responses.context import Context
from rose.frontend.responses.events import Event, sse
from rose.frontend.responses.items import Item
from rose.frontend.responses.schemas import ReasoningItem, ResponseBody
from rose.frontend.responses.store import Record, Store, StoreError
from rose.frontend.responses.writer import ResponseWriter
from rose.frontend.schemas import encode
from rose.frontend.stream import JobSource
from rose.utils.log import get_logger

logger = get_logger(__name__)


class Turn:
    """A response that is being made; run it once."""

    def __init__(
        self,
        client: EngineClient,
        job: Job,
        writer: ResponseWriter,
        context: Context,
        *,
        store: Store,
        metrics: Metrics,
        owner: str,
        is_hidden: bool,
        is_debug: bool,
    ) -> None:
        self.job = job
        self.writer = writer
        self.client = client
        self._context = context
        self._store = store
        self.metrics = metrics
        self._owner = owner
        self._is_hidden = is_hidden
        self._is_debug = is_debug
        self._is_created = self._is_begun = False

    @property
    def body(self) -> ResponseBody:
        """The response as far as it has come."""
        return self.writer.body

    def created(self) -> list[Event]:
        """Return the first events, once."""
        if self._is_created:
            return []
        self._is_created = True
        return self.writer.created()

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """Run the job and yield its events, the last ones once the response is kept; closing it aborts the job.

        Raises  RequestError where the engine refuses or fails; `failed` has the events for that.
        """
        async with aclosing(pieces(self.client, self.job, self.metrics)) as source:
            async for piece in source:
                yield self.take(piece)
        self.metrics.finished(self.job)
        yield self.end()

    def take(self, piece: Piece) -> list[Event]:
        """Return the events of one piece."""
        first: list[Event] = []
        if not self._is_begun:
            # The engine has taken the request: in the foreground, only now is there a response.
            self._is_begun = True
            first = [*self.created(), *self._begun()]
        return first + self.writer.events(piece)

    def end(self) -> list[Event]:
        """Return the events after the last piece; the response is kept."""
        if self._is_debug:
            self.body.raw_messages = [_raw(m) for m in self.job.runs[0].answer().messages]
        events = self.writer.end()
        self.keep()
        return events + self.writer.last()

    def _begun(self) -> list[Event]:
        events = self.writer.begun()
        if self.body.background:
            self.keep()
        return events

    def failed(self, error: RequestError) -> list[Event]:
        """Return the events that end a response which broke off; it is kept as far as it came."""
        events = self.writer.fail(error)
        self.keep()
        return events + self.writer.last()

    def cancelled(self) -> None:
        """Keep the response as far as it came before somebody cancelled it."""
        self.writer.cancel()
        self.keep()

    def keep(self) -> None:
        """Put the response as it is into the store, where that was asked for.

        An answer is not lost with a store that fails: `store` in it says that it was not kept.
        """
        if not self.body.store:
            return
        try:
            self._store.put(self.record())
        except StoreError as error:
            logger.error("%s is not kept: %s", self.body.id, error)
            self.body.store = False

    def record(self) -> Record:
        """Return the response with all that a next turn needs."""
        output, sampled = self._private_output()
        first = len(self._context.items)
        return Record(
            id=self.body.id,
            status=self.body.status,
            body=msgspec.Raw(encode(self.body)),
            history=self._context.items,
            output=output,
            sampled=self._context.sampled | {first + i: ids for i, ids in sampled.items()},
            owner=self._owner,
            is_background=self.body.background,
            is_hidden=self._is_hidden,
        )

    def _private_output(self) -> tuple[list[Item], dict[int, list[int]]]:
        """Return the output with its reasoning even where it is hidden, and the tokens of what can be repeated."""
        messages = self.job.runs[0].answer().messages
        output: list[Item] = []
        sampled: dict[int, list[int]] = {}
        for i, (item, place) in enumerate(zip(self.body.output, self.writer.places, strict=True)):
            message = messages[place] if place < len(messages) else None
            private: Item = msgspec.to_builtins(item)
            if message is not None and isinstance(item, ReasoningItem):
                private["content"] = [{"type": "reasoning_text", "text": message.content}]
            output.append(private)
            # An item that was cut, or shows something else than was sampled, is rendered from its text.
            if message is None or message.token_ids is None or item.status != "completed":
                continue
            if _text(private) == message.content:
                sampled[i] = message.token_ids
        return output, sampled


class TurnSource(JobSource):
    """A response in the foreground, as an answer that ends with its client; see `stream.AnswerSource`."""

    def __init__(self, turn: Turn) -> None:
        super().__init__(turn.client, turn.job, turn.metrics)
        self._turn = turn

    def lines(self, piece: Piece) -> bytes:
        """Return the events of one piece."""
        return b"".join(map(sse, self._turn.take(piece)))

    def plain_lines(self, run: ChoiceRun, texts: list[str]) -> list[bytes]:
        """Return the events of each text."""
        return self._turn.writer.plain(texts)

    def end(self) -> bytes:
        """Return the events after the last piece."""
        return b"".join(map(sse, self._turn.end()))

    async def whole(self) -> bytes:
        """Return the response."""
        async with aclosing(self._turn.events()) as source:
            async for _ in source:
                pass
        return encode(self._turn.body)

    async def failed(self, error: RequestError) -> bytes:
        """Return the events of a response that broke off."""
        return b"".join(map(sse, self._turn.failed(error)))


def _text(item: Item) -> str:
    if item["type"] == "function_call":
        return item["arguments"]
    return "".join(part["text"] for part in item["content"])


def _raw(message: Any) -> dict[str, str | None]:
    return {
        "role": message.role,
        "name": message.name,
        "channel": message.channel,
        "recipient": message.recipient,
        "content_type": message.content_type,
        "content": message.content,
    }
