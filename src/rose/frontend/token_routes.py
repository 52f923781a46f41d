"""Routes that speak of tokens: what a text is in tokens, what a request would send to the engine, tokens in and out."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rose.frontend.body import INLINE_BODY_BYTES, parsed, read_body, timeout_of
from rose.frontend.client import EngineClient
from rose.frontend.config import FrontendConfig
from rose.frontend.errors import RequestError
from rose.frontend.formatters.base import Formatter
from rose.frontend.generation import Job
from rose.frontend.jobs import JobMaker
from rose.frontend.metrics import Metrics
from rose.frontend.parsing import (
    check_choices,
    checked_top_logprobs,
    convert,
    parse_chat,
    parse_completion,
    parse_json,
    refuse,
)
from rose.frontend.reply import JSON
from rose.frontend.schemas import ChatRequest, CompletionRequest, encode
from rose.frontend.stream import AnswerResponse, ChunkSource
from rose.frontend.token_answers import TokenFold, TokenWriter
from rose.frontend.token_schemas import (
    Detokenized,
    DetokenizeRequest,
    RenderedPrompt,
    RenderedPrompts,
    Tokenized,
    TokenizeRequest,
    TokenRequest,
)

MAX_STOP_IDS = 64
"""As many as the engine can hold off for min_tokens."""
MAX_ID = 2**31 - 1
"""Before the engine has told how large its vocabulary is."""


class TokenRoutes:
    """The handlers."""

    def __init__(
        self, config: FrontendConfig, client: EngineClient, jobs: JobMaker, metrics: Metrics
    ) -> None:
        self._config = config
        self._client = client
        self._jobs = jobs
        self._text = jobs.text_formatter
        self._metrics = metrics

    def routes(self) -> list[Route]:
        """Return the routes of these handlers."""
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/chat/completions/render", self.render_chat, methods=["POST"]),
            Route("/v1/completions/render", self.render_completion, methods=["POST"]),
            Route("/v1/generate", self.generate, methods=["POST"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        raw = await self._read(request)
        asked = await parsed(raw, _read_tokenize)
        self._check_model(asked.model)
        formatter = self._text

        def work() -> Tokenized:
            ids = formatter.encode({"prompt": asked.prompt}).token_ids if asked.prompt else []
            texts = [_text(formatter, [i]) for i in ids] if asked.return_token_strs else UNSET
            return Tokenized(
                count=len(ids), max_model_len=self._context(), tokens=ids, token_strs=texts
            )

        return _json(
            await (asyncio.to_thread(work) if len(raw) > INLINE_BODY_BYTES else _now(work))
        )

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        raw = await self._read(request)
        asked = await parsed(raw, _read_detokenize)
        self._check_model(asked.model)
        status = self._client.status
        most = status.vocab_size - 1 if status and status.is_ready else MAX_ID
        wrong = next((i for i in asked.tokens if not 0 <= i <= most), None)
        if wrong is not None:
            raise RequestError(
                "invalid_request", f"tokens has {wrong}; allowed: 0 to {most}", param="tokens"
            )
        return _json(Detokenized(prompt=_text(self._text, asked.tokens)))

    async def render_chat(self, request: Request) -> Response:
        """POST /v1/chat/completions/render: what POST /v1/chat/completions would send to the engine."""
        raw = await self._read(request)
        body, chat = await parsed(raw, _read_chat)
        self._check_model(chat.model)
        status = self._client.require_ready()
        job = await self._jobs.chat(chat, body, status, num_bytes=len(raw))
        return self._rendered(job)

    async def render_completion(self, request: Request) -> Response:
        """POST /v1/completions/render."""
        raw = await self._read(request)
        completion = await parsed(raw, _read_completion)
        self._check_model(completion.model)
        status = self._client.require_ready()
        job = await self._jobs.completion(completion, status, num_bytes=len(raw))
        return self._rendered(job)

    async def generate(self, request: Request) -> AnswerResponse:
        """POST /v1/generate."""
        raw = await self._read(request)
        asked = await parsed(raw, _read_tokens)
        self._check_model(asked.model)
        job = self._jobs.tokens(asked, self._client.require_ready())
        source = ChunkSource(
            self._client, job, writer=TokenWriter(job), fold=TokenFold(job), metrics=self._metrics
        )
        timeout_s = timeout_of(request, self._config.request_timeout_s)
        return AnswerResponse(source, self._metrics, timeout_s=timeout_s)

    async def _read(self, request: Request) -> bytes:
        return await read_body(request, max_bytes=self._config.max_request_bytes)

    def _check_model(self, name: str | None) -> None:
        if name is not None:
            self._jobs.check_model(name)

    def _context(self) -> Any:
        status = self._client.status
        return status.context_tokens if status and status.is_ready else UNSET

    def _rendered(self, job: Job) -> Response:
        formatter = self._text
        prompts = {run.prompt: r for run, r in zip(job.runs, job.requests, strict=True)}
        data = [
            RenderedPrompt(
                token_ids=request.prompt_token_ids,
                text=_text(formatter, request.prompt_token_ids),
                stop_token_ids=request.stop_token_ids,
                max_tokens=request.max_tokens,
            )
            for _, request in sorted(prompts.items())
        ]
        return _json(RenderedPrompts(model=job.model, data=data))


async def _now(work: Any) -> Any:
    return work()


def _text(formatter: Formatter, token_ids: list[int]) -> str:
    return b"".join(map(formatter.token_bytes, token_ids)).decode("utf-8", "replace")


def _json(answer: msgspec.Struct) -> Response:
    return Response(encode(answer), media_type=JSON)


def _read_tokenize(raw: bytes) -> TokenizeRequest:
    return convert(parse_json(raw), TokenizeRequest, {})


def _read_detokenize(raw: bytes) -> DetokenizeRequest:
    return convert(parse_json(raw), DetokenizeRequest, {})


def _read_chat(raw: bytes) -> tuple[dict[str, Any], ChatRequest]:
    body = parse_json(raw)
    return body, parse_chat(body)


def _read_completion(raw: bytes) -> CompletionRequest:
    return parse_completion(parse_json(raw))


def _read_tokens(raw: bytes) -> TokenRequest:
    request = convert(parse_json(raw), TokenRequest, {})
    check_choices(request)
    if request.stop:
        refuse(
            "unsupported_value",
            "stop",
            "stop was given, and tokens are not searched for text; allowed: null; use stop_token_ids",
        )
    checked_top_logprobs(request.logprobs, "logprobs")
    if len(request.stop_token_ids or ()) > MAX_STOP_IDS:
        refuse(
            "invalid_request",
            "stop_token_ids",
            f"stop_token_ids has {len(request.stop_token_ids or ())} ids; allowed: {MAX_STOP_IDS}",
        )
    return request
