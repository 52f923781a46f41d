"""A job as an HTTP answer: one JSON body or server-sent events, errors at any moment, client gone at any moment.

The status line waits for the first event of the engine, so that a refused request gets its own status; a failure
after it becomes an `error` event. Knows chunks and bytes, not what is in them.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, nullcontext
from functools import partial
from itertools import islice
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from rose.frontend.client import EngineClient, Shortcut, Submission, Waiting
from rose.frontend.errors import RequestError, error_body
from rose.frontend.formatters.base import DeltaKind
from rose.frontend.generation import ChoiceRun, Job, Piece, PieceMaker, pieces
from rose.frontend.http import HELD_WRITES, HeldWrites
from rose.frontend.metrics import Metrics
from rose.frontend.middleware import current_request_id, log_failure
from rose.frontend.reply import send_error, send_json, start
from rose.frontend.schemas import encode
from rose.frontend.sse import DONE, ChunkWriter, sse_event, sse_lines
from rose.protocol.event import TokensEvent
from rose.utils.log import get_logger

SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
SERVER_SEND = "rose.server_send"
"""In the scope: the `send` of the HTTP server itself. Nobody between looks at the body of an answer that has begun, so
the parts of a stream go straight there; for every token of every stream that counts."""

logger = get_logger(__name__)


BODY = "http.response.body"
SendNow = Callable[[list[bytes]], int]
"""Sends parts of a begun answer as far as that needs no waiting; returns how many were sent."""
MAX_PARTS = 64
"""Made and sent at once; what waits longer, for a slow client, waits as tokens."""
MAX_STRETCH = 32
"""Tokens looked at in one go: most go the short way together, but behind one that cannot they are looked at again."""


class AnswerSource(Protocol):
    """What one request is answered with, as bytes: `ChunkSource`, or `TurnSource` of the Responses API."""

    endpoint: str
    """In metrics."""
    answer_id: str
    is_stream: bool

    def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events as they come; closing it ends the work."""
        ...

    async def whole(self) -> bytes:
        """Return the JSON of the whole answer."""
        ...

    async def failed(self, error: RequestError) -> bytes:
        """Return the events that end a stream which failed after its beginning."""
        ...


class Fold(Protocol):
    """Makes a whole answer of chunks: `ChatFold` or `CompletionFold`."""

    def add(self, chunks: Iterable[Any]) -> None: ...
    def completion(self) -> Any: ...


class JobSource(ABC):
    """A job answered as its tokens come; most are sent on the spot, see `client.Shortcut`."""

    def __init__(self, client: EngineClient, job: Job, metrics: Metrics) -> None:
        self.endpoint = job.endpoint
        self.answer_id = job.answer_id
        self.is_stream = job.is_stream
        self._client = client
        self._job = job
        self._metrics = metrics
        self.send_now: SendNow | None = None
        """Set once parts can be sent past the generator, which then only yields what is left."""

    @abstractmethod
    def lines(self, piece: Piece) -> bytes:
        """Return the events of one piece."""

    @abstractmethod
    def plain_lines(self, run: ChoiceRun, texts: list[str]) -> list[bytes]:
        """Return the events of each of some texts that only continue what a choice is writing."""

    @abstractmethod
    def end(self) -> bytes:
        """Return the events after the last piece."""

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the events as they come."""
        maker = PieceMaker(self._job, self._metrics)
        async with self._client.submit(*self._job.requests) as events:
            events.shortcut = self._shortcut(maker, events)
            async for event in events:
                if isinstance(event, bytes):
                    yield event
                    continue
                piece = maker.take(event, events)
                if piece is not None:
                    yield self.lines(piece)
        self._metrics.finished(self._job)
        yield self.end()

    def _shortcut(self, maker: PieceMaker, events: Submission) -> Shortcut:
        """Return what sends tokens past `parts`."""
        # Names bound once and few calls: it runs for every token of every stream.
        runs, tokens_came, plain_lines = maker.runs, maker.watch.tokens, self.plain_lines

        def send_waiting(waiting: Waiting) -> None:
            send_now = self.send_now
            if send_now is None:
                return
            parts: list[bytes] = []
            is_last = False
            try:
                while waiting and not is_last and len(parts) < MAX_PARTS:
                    event = waiting[0]
                    if type(event) is not TokensEvent:
                        break
                    request_id = event.request_id
                    run = runs[request_id]
                    if run.plain is not None:
                        texts = run.plain(_single_tokens(event, waiting))
                        if texts:
                            for _ in texts:
                                waiting.popleft()
                            num_texts = len(texts)
                            run.num_output_tokens += num_texts
                            tokens_came(request_id, num_texts)
                            parts += plain_lines(run, texts)
                            continue
                    waiting.popleft()
                    piece = maker.take(event, events)
                    if piece is not None:
                        parts.append(self.lines(piece))
                        is_last = piece.finish_reason is not None
            except Exception as bug:  # noqa: BLE001 - for the task of this answer; here it would end everybody's
                waiting.appendleft(bug)
            # The last part is left to the reader, who would not see that it was the last.
            num_sent = send_now(parts[:-1] if is_last else parts) if parts else 0
            if num_sent < len(parts):
                waiting.appendleft(b"".join(parts[num_sent:]))

        return send_waiting


def _single_tokens(first: TokensEvent, waiting: Waiting) -> list[int]:
    """Return the tokens of the events from the first on that have one each and belong to the same request."""
    if len(waiting) == 1:
        return first.token_ids if len(first.token_ids) == 1 else []
    request_id = first.request_id
    token_ids: list[int] = []
    for event in islice(waiting, MAX_STRETCH):
        if type(event) is not TokensEvent or event.request_id != request_id:
            break
        found = event.token_ids
        if len(found) != 1:
            break
        token_ids += found
    return token_ids


class ChunkSource(JobSource):
    """A job answered in chunks: chat and text completions."""

    def __init__(
        self, client: EngineClient, job: Job, *, writer: ChunkWriter, fold: Fold, metrics: Metrics
    ) -> None:
        super().__init__(client, job, metrics)
        self._writer = writer
        self._fold = fold
        self._run: ChoiceRun | None = None
        self._continues: tuple[DeltaKind, int] | None = None
        self._parts: list[bytes] = []

    def lines(self, piece: Piece) -> bytes:
        """Return the chunks of one piece."""
        return self._writer.lines(piece)

    def plain_lines(self, run: ChoiceRun, texts: list[str]) -> list[bytes]:
        """Return the chunk of each text."""
        # The same objects until another message of the choice begins, or another choice is written.
        continues = run.decoder.continues
        if continues is not self._continues or run is not self._run:
            self._run, self._continues = run, continues
            self._parts = self._writer.template(run.index, *continues)
        parts = self._parts
        if len(texts) == 1:
            return [encode(texts[0]).join(parts)]
        return [encode(text).join(parts) for text in texts]

    def end(self) -> bytes:
        """Return the usage where it was asked for, and the end."""
        return (sse_lines([self._writer.usage_chunk()]) if self._job.with_usage else b"") + DONE

    async def whole(self) -> bytes:
        """Return the chunks folded into one answer."""
        async with aclosing(pieces(self._client, self._job, self._metrics)) as source:
            async for piece in source:
                self._fold.add(self._writer.chunks(piece))
        self._metrics.finished(self._job)
        return encode(self._fold.completion())

    async def failed(self, error: RequestError) -> bytes:
        """Return the error as an event, and the end."""
        return sse_event(error_body(error)) + DONE


class AnswerResponse:
    """The ASGI response of one answer."""

    def __init__(
        self, source: AnswerSource, metrics: Metrics, *, timeout_s: float | None = None
    ) -> None:
        self._source = source
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or stop the work as soon as the client is gone."""
        self._send_body = scope.get(SERVER_SEND, send)
        self._connection: HeldWrites | None = scope.get(HELD_WRITES)
        self._writes = self._connection or nullcontext()
        work = asyncio.ensure_future(self._answer(send))
        gone = asyncio.ensure_future(_until_disconnect(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._metrics.disconnected(self._source.endpoint)
                logger.info("%s: the client left, its request is aborted", current_request_id())
        finally:
            # Cancelling closes `parts`, which aborts the engine's request.
            was_done = work.done()
            work.cancel()
            gone.cancel()
            results = await asyncio.gather(work, gone, return_exceptions=True)
        if was_done and isinstance(results[0], Exception):
            raise results[0]

    def _left_late(self, request_id: str) -> None:
        self._metrics.disconnected(self._source.endpoint, is_answered=True)
        logger.info("%s: the client left before it had the whole answer", request_id)

    async def _answer(self, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await (self._stream(send) if self._source.is_stream else self._whole(send))
        except RequestError as error:
            await self._fail(error, send)
        except TimeoutError:
            text = (
                f"the answer was not done within {self._timeout_s:g} s, the limit of this request"
            )
            await self._fail(RequestError("request_timeout", text), send)
        except Exception as bug:  # noqa: BLE001
            # Answered rather than dropped: a client would take a cut stream for a finished one.
            log_failure(bug)
            error = RequestError("internal_error", "the server failed while it wrote this answer")
            await self._fail(error, send)
        if self._connection is not None:
            # All is written, and a client that reads slowly may still leave before all of it has left.
            self._connection.if_lost(partial(self._left_late, current_request_id()))

    async def _stream(self, send: Send) -> None:
        async with aclosing(self._source.parts()) as parts:
            async for part in parts:
                await self._send_part(send, part)
                if isinstance(self._source, JobSource):
                    self._source.send_now = self._send_now
        await self._send_part(send, b"", is_last=True)

    def _send_now(self, parts: list[bytes]) -> int:
        # The server waits only for a client that does not read, and then before it writes anything.
        self._num_sent = 0
        try:
            if len(parts) == 1:
                sending = self._send_body({"type": BODY, "body": parts[0], "more_body": True})
                sending.send(None)
            else:
                sending = self._send_each(parts)
                with self._writes:
                    sending.send(None)
        except StopIteration:
            return len(parts)
        except Exception:  # noqa: BLE001 - it comes again where the task of this answer sends what is left
            return self._num_sent
        sending.close()
        return self._num_sent

    async def _send_each(self, parts: list[bytes]) -> None:
        send, num_sent = self._send_body, 0
        try:
            for part in parts:
                await send({"type": BODY, "body": part, "more_body": True})
                num_sent += 1
        finally:
            self._num_sent = num_sent

    async def _whole(self, send: Send) -> None:
        await send_json(send, 200, await self._source.whole())

    async def _send_part(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        if not self._is_started:
            self._is_started = True
            await send(start(200, SSE_HEADERS))
        if body or is_last:
            await send({"type": BODY, "body": body, "more_body": not is_last})

    async def _fail(self, error: RequestError, send: Send) -> None:
        self._metrics.answered(self._source.endpoint, error.kind.status, "error")
        if self._is_started:
            await self._send_part(send, await self._source.failed(error), is_last=True)
        else:
            await send_error(send, error)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
