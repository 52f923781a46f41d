"""The routes. Each handler reads, checks and hands over; what they do stands in the files they call."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

from msgspec import UNSET
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from rose.frontend.access import KeyCheck, Origins
from rose.frontend.body import parsed, read_body, timeout_of
from rose.frontend.chat import ChatFold, ChatWriter
from rose.frontend.client import EngineClient
from rose.frontend.completions import CompletionFold, CompletionWriter
from rose.frontend.config import FrontendConfig
from rose.frontend.docs_page import page
from rose.frontend.errors import RequestError, error_body, error_headers
from rose.frontend.generation import Job
from rose.frontend.jobs import JobMaker
from rose.frontend.metrics import Metrics
from rose.frontend.middleware import RequestFrame
from rose.frontend.openapi import document
from rose.frontend.parsing import MAX_QUOTED, parse_chat, parse_completion, parse_json
from rose.frontend.reply import JSON
from rose.frontend.responses.routes import ResponsesRoutes
from rose.frontend.responses.store import StoreError
from rose.frontend.schemas import (
    ChatRequest,
    CompletionRequest,
    Health,
    Model,
    ModelList,
    encode,
)
from rose.frontend.sse import ChunkWriter
from rose.frontend.stream import SERVER_SEND, AnswerResponse, ChunkSource, Fold
from rose.frontend.token_routes import TokenRoutes

ENDPOINTS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/generate": "generate",
}
"""Names in metrics; a client's path never becomes a label."""
RESPONSES = "/v1/responses"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Routes:
    """The handlers of one server."""

    def __init__(
        self, config: FrontendConfig, client: EngineClient, jobs: JobMaker, metrics: Metrics
    ) -> None:
        self._config = config
        self._client = client
        self._jobs = jobs
        self._metrics = metrics
        self._started = int(time.time())

    async def chat_completions(self, request: Request) -> AnswerResponse:
        """POST /v1/chat/completions."""
        raw = await read_body(request, max_bytes=self._config.max_request_bytes)
        body, chat = await parsed(raw, _read_chat)
        self._jobs.check_model(chat.model)
        status = self._client.require_ready()
        job = await self._jobs.chat(chat, body, status, num_bytes=len(raw))
        return self._chunked(request, job, ChatWriter(job), ChatFold(job))

    async def completions(self, request: Request) -> AnswerResponse:
        """POST /v1/completions."""
        raw = await read_body(request, max_bytes=self._config.max_request_bytes)
        completion = await parsed(raw, _read_completion)
        self._jobs.check_model(completion.model)
        status = self._client.require_ready()
        job = await self._jobs.completion(completion, status, num_bytes=len(raw))
        return self._chunked(request, job, CompletionWriter(job), CompletionFold(job))

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        models = [self._model(name) for name in self._jobs.model_names]
        return Response(encode(ModelList(data=models)), media_type=JSON)

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        name = request.path_params["name"]
        self._jobs.check_model(name)
        return Response(encode(self._model(name)), media_type=JSON)

    async def health(self, _: Request) -> Response:
        """GET /health: 200 while the engine lives, loading included; 503 once it is dead or stuck."""
        return self._health_response(is_ok=self._client.problem() is None)

    async def ready(self, _: Request) -> Response:
        """GET /ready: 200 while requests are taken; 503 before and after."""
        return self._health_response(is_ok=self._client.is_ready)

    async def metrics(self, _: Request) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(self._metrics.render(), media_type=PROMETHEUS)

    def _chunked(
        self, request: Request, job: Job, writer: ChunkWriter, fold: Fold
    ) -> AnswerResponse:
        source = ChunkSource(self._client, job, writer=writer, fold=fold, metrics=self._metrics)
        timeout_s = timeout_of(request, self._config.request_timeout_s)
        return AnswerResponse(source, self._metrics, timeout_s=timeout_s)

    def _model(self, name: str) -> Model:
        status = self._client.status
        context = status.context_tokens if status and status.is_ready else UNSET
        return Model(id=name, created=self._started, max_model_len=context)

    def _health_response(self, *, is_ok: bool) -> Response:
        problem, status = self._client.problem(), self._client.status
        if problem is not None:
            health = Health(status="failed", detail=problem)
        elif self._client.is_draining:
            health = Health(
                status="draining", detail="running answers are finished, no more are taken"
            )
        elif status is None or not status.is_ready:
            health = Health(status="loading", detail=status.detail if status else "starting")
        else:
            health = Health(
                status="ok",
                model=self._jobs.model_names[0],
                context_tokens=status.context_tokens,
                num_running=status.num_running,
                num_waiting=status.num_waiting,
            )
        return Response(encode(health), status_code=200 if is_ok else 503, media_type=JSON)


class Description:
    """What this server says of itself; made when it is first asked for."""

    def __init__(self, model_names: Sequence[str], *, has_keys: bool) -> None:
        self._model_names = model_names
        self._has_keys = has_keys

    async def openapi(self, _: Request) -> Response:
        """GET /openapi.json."""
        return Response(encode(self._document), media_type=JSON)

    async def docs(self, _: Request) -> Response:
        """GET /docs."""
        return Response(page(self._document), media_type="text/html")

    @cached_property
    def _document(self) -> dict[str, Any]:
        return document(self._model_names, has_keys=self._has_keys)


def create_app(
    config: FrontendConfig,
    client: EngineClient,
    jobs: JobMaker,
    metrics: Metrics,
    *,
    keys: Iterable[str] = (),
) -> Starlette:
    """Return the application; the client is started and closed with it. `keys`: see `access.read_keys`."""
    routes = Routes(config, client, jobs, metrics)
    responses = ResponsesRoutes(config, client, jobs, metrics)
    keys = tuple(keys)
    described = Description(jobs.model_names, has_keys=bool(keys))
    token_routes = TokenRoutes(config, client, jobs, metrics)
    metrics.observe_engine(client)
    if jobs.grammars.is_able:
        client.bring(jobs.grammars.vocabulary())

    async def on_request_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        endpoint = _endpoint(request.url.path)
        metrics.answered(endpoint, error.kind.status, "error")
        return _error_response(error)

    async def on_store_error(request: Request, error: Exception) -> Response:
        told = f"{error}; try again later, or send the whole conversation with store: false"
        return await on_request_error(request, RequestError("store_unavailable", told))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await client.start()
        try:
            yield
        finally:
            await responses.drain()
            await client.close()
            await responses.close()
            jobs.grammars.close()

    async def on_disconnect(request: Request, error: Exception) -> Response:
        metrics.disconnected(_endpoint(request.url.path))
        return _error_response(RequestError("client_disconnected", "the client left"))

    app = _App(
        routes=[
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            *responses.routes(),
            *token_routes.routes(),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/openapi.json", described.openapi),
            Route("/docs", described.docs),
            Route("/health", routes.health),
            Route("/ready", routes.ready),
            Route("/metrics", routes.metrics),
        ],
        middleware=[
            Middleware(RequestFrame, metrics=metrics, logs_requests=config.log_requests),
            Middleware(Origins, allowed=config.allowed_origins, metrics=metrics),
            Middleware(KeyCheck, keys=keys, metrics=metrics),
        ],
        exception_handlers={
            RequestError: on_request_error,
            StoreError: on_store_error,
            HTTPException: _on_http_error,
            ClientDisconnect: on_disconnect,
        },
        lifespan=lifespan,
    )
    # A redirect would be an answer of no API; the path without its last slash is what was meant, and is named.
    app.router.redirect_slashes = False
    return app


def _endpoint(path: str) -> str:
    is_response = path == RESPONSES or path.startswith(f"{RESPONSES}/")
    return "responses" if is_response else ENDPOINTS.get(path, "other")


class _App(Starlette):
    """Remembers the server's own `send`; see SERVER_SEND."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        scope[SERVER_SEND] = send
        await super().__call__(scope, receive, send)


def _read_chat(raw: bytes) -> tuple[dict[str, Any], ChatRequest]:
    body = parse_json(raw)
    return body, parse_chat(body)


def _read_completion(raw: bytes) -> CompletionRequest:
    return parse_completion(parse_json(raw))


def _error_response(error: RequestError) -> Response:
    return Response(
        error_body(error),
        status_code=error.kind.status,
        media_type=JSON,
        headers=error_headers(error),
    )


def _methods_there(request: Request) -> list[str]:
    """Return the methods of a path, which may be spread over several routes; Starlette names those of one."""
    routes = [r for r in request.app.router.routes if isinstance(r, Route)]
    paths = [r.path for r in routes if r.matches(request.scope)[0] is not Match.NONE]
    return sorted({m for r in routes if r.path in paths[:1] for m in r.methods or ()})


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:MAX_QUOTED]}"
    if error.status_code == 405:
        allowed = ", ".join(_methods_there(request))
        response = _error_response(
            RequestError("method_not_allowed", f"{where}: allowed here: {allowed}")
        )
        response.headers["allow"] = allowed
        return response
    return _error_response(
        RequestError("not_found", f"{where}: there is no such route; docs/api.md lists them")
    )
