"""The routes of the Responses API. Each handler reads, checks and hands over."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rose.frontend.access import KEY_NAME
from rose.frontend.body import parsed, read_body, timeout_of
from rose.frontend.client import EngineClient
from rose.frontend.config import FrontendConfig
from rose.frontend.errors import RequestError
from rose.frontend.jobs import JobMaker
from rose.frontend.metrics import Metrics
from rose.frontend.parsing import parse_json, quoted
from rose.frontend.reply import JSON
from rose.frontend.responses.background import Background, is_lost
from rose.frontend.responses.gauges import StoreGauges
from rose.frontend.responses.maker import TurnMaker
from rose.frontend.responses.parsing import parse_input_tokens, parse_response
from rose.frontend.responses.reading import Reader
from rose.frontend.responses.schemas import (
    DeletedResponse,
    InputTokens,
    ResponsesRequest,
)
from rose.frontend.responses.sealing import load_sealer
from rose.frontend.responses.store import Record, as_failed, limits_of, owned
from rose.frontend.responses.stores import open_store
from rose.frontend.responses.turn import TurnSource
from rose.frontend.schemas import encode
from rose.frontend.stream import AnswerResponse

ENDPOINT = "responses"
PATH = "/v1/responses"


class ResponsesRoutes:
    """The handlers of one server, and what they share."""

    def __init__(
        self, config: FrontendConfig, client: EngineClient, jobs: JobMaker, metrics: Metrics
    ) -> None:
        self._config = config
        self._client = client
        self._jobs = jobs
        self._metrics = metrics
        self._store = open_store(config)
        sealer = load_sealer(config.responses_key_file)
        self._maker = TurnMaker(config, client, jobs, metrics, store=self._store, sealer=sealer)
        hides = config.reasoning == "hidden"
        self._reader = Reader(sealer, hides=hides)
        self._background = Background(
            self._store,
            limits_of(config),
            metrics,
            hides=hides,
        )
        self._gauges = StoreGauges(self._store, self._background.num_running)
        metrics.registry.register(self._gauges)

    def routes(self) -> list[Route]:
        """Return the routes."""
        one = PATH + "/{response_id}"
        return [
            Route(PATH, self.create, methods=["POST"]),
            Route(f"{PATH}/input_tokens", self.input_tokens, methods=["POST"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
            Route(f"{one}/input_items", self.input_items, methods=["GET"]),
            Route(one, self.retrieve, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
        ]

    async def drain(self) -> None:
        """Let what runs in the background finish, as long as answers may at a shutdown."""
        await self._background.wait(self._config.shutdown_timeout_s)

    async def close(self) -> None:
        """Keep how far the rest came, then close the store; the engine's client is closed before and has failed it."""
        await self._background.wait()
        # Counts are published until the other frontends have ended too; what is closed has no sizes any more.
        self._metrics.registry.unregister(self._gauges)
        self._store.close()

    async def create(self, request: Request) -> AnswerResponse | Response:
        """POST /v1/responses."""
        raw = await read_body(request, max_bytes=self._config.max_request_bytes)
        asked = await parsed(raw, _read_request)
        self._jobs.check_model(asked.model)
        timeout_s = timeout_of(request, self._config.request_timeout_s)
        status = self._client.require_ready()
        turn = await self._maker.turn(asked, status, owner=_owner(request), num_bytes=len(raw))
        if not asked.background:
            return AnswerResponse(TurnSource(turn), self._metrics, timeout_s=timeout_s)
        log = self._background.start(turn, timeout_s=timeout_s)
        if asked.stream:
            return AnswerResponse(LogSource(turn.body.id, log.read(0)), self._metrics)
        return _json(encode(turn.body))

    async def retrieve(self, request: Request) -> AnswerResponse | Response:
        """GET /v1/responses/{id}, whole or (stream=true) its events after `starting_after`."""
        query = self._reader.query(request.query_params)
        record = self._record(request)
        if query.is_stream:
            events = self._background.events(record, query.first)
            if events is None:
                raise RequestError(
                    "invalid_request",
                    f"the events of {quoted(record.id)} are not kept; allowed: responses that were made with "
                    "background=true, as long as the server keeps their events; leave stream out",
                    param="stream",
                )
            return AnswerResponse(LogSource(record.id, events), self._metrics)
        turn = self._background.running(record.id)
        return _json(encode(turn.body) if turn else self._reader.body(record, query))

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{id}; what runs is cancelled."""
        record = self._record(request)
        await self._background.cancel(record)
        self._background.forget(record.id)
        self._store.delete(record.id)
        return _json(encode(DeletedResponse(id=record.id)))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel; a response that has ended stays as it is."""
        record = self._record(request)
        if not record.is_background:
            raise RequestError(
                "invalid_request",
                f"{quoted(record.id)} was not made with background=true; such a response ends when its client "
                "hangs up",
                param="response_id",
            )
        await self._background.cancel(record)
        return _json(self._reader.body(self._record(request), self._reader.query({})))

    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/{id}/input_items: everything the answer was generated from, instructions left out."""
        record = self._record(request)
        return _json(encode(self._reader.input_items(record, request.query_params)))

    async def input_tokens(self, request: Request) -> Response:
        """POST /v1/responses/input_tokens."""
        raw = await read_body(request, max_bytes=self._config.max_request_bytes)
        read = partial(_read_input_tokens, model=self._jobs.model_names[0])
        asked = await parsed(raw, read)
        self._jobs.check_model(asked.model)
        status = self._client.require_ready()
        count = await self._maker.input_tokens(
            asked, status, owner=_owner(request), num_bytes=len(raw)
        )
        return _json(encode(InputTokens(input_tokens=count)))

    def _record(self, request: Request) -> Record:
        response_id = request.path_params["response_id"]
        record = owned(self._store.get(response_id), _owner(request))
        if record is None:
            raise RequestError(
                "response_not_found",
                f"there is no response {quoted(response_id)}; it was not stored, or is not kept any more (see "
                "--response-store)",
                param="response_id",
            )
        if is_lost(record):
            record = as_failed(record, "the server that made this response has ended")
            self._store.put(record)
        return record


class LogSource:
    """The events of a response in the background, as an answer; who reads them may leave at any time."""

    endpoint = ENDPOINT
    is_stream = True

    def __init__(self, response_id: str, events: AsyncGenerator[bytes, None]) -> None:
        self.answer_id = response_id
        self._events = events

    def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the events."""
        return self._events

    async def whole(self) -> bytes:
        """Events come as a stream only."""
        raise AssertionError("is_stream is True")

    async def failed(self, error: RequestError) -> bytes:
        """Return nothing: the response's own failure is among its events."""
        return b""


def _owner(request: Request) -> str:
    return request.scope.get(KEY_NAME, "")


def _read_request(raw: bytes) -> ResponsesRequest:
    return parse_response(parse_json(raw))


def _read_input_tokens(raw: bytes, *, model: str) -> ResponsesRequest:
    return parse_input_tokens(parse_json(raw), model=model)


def _json(body: Any) -> Response:
    return Response(body, media_type=JSON)
