"""Checked requests of the Responses API -> turns, and numbers of input tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rose.frontend.client import EngineClient
from rose.frontend.config import FrontendConfig
from rose.frontend.errors import RequestError
from rose.frontend.formatters.base import EncodedPrompt
from rose.frontend.generation import Job, new_id
from rose.frontend.jobs import Ask, JobMaker
from rose.frontend.metrics import Metrics
from rose.frontend.reasoning import resolve_mode
from rose.frontend.responses.context import Context, body_of, resolve
from rose.frontend.responses.ids import RESPONSE_PREFIX
from rose.frontend.responses.parsing import (
    ENCRYPTED_REASONING,
    read_tools,
    response_logprobs,
)
from rose.frontend.responses.schemas import ResponseBody, ResponsesRequest
from rose.frontend.responses.sealing import Sealer
from rose.frontend.responses.store import NoStore, Store
from rose.frontend.responses.turn import Turn
from rose.frontend.responses.writer import ResponseWriter
from rose.frontend.schemas import encode
from rose.protocol.event import EngineStatus
from rose.protocol.grammar import Constraint

LEFT_FOR_ANSWER = 8
"""With truncation=auto and no limit on the answer, one part in so many of the context is left for it. Guessed."""
DEFAULT_EFFORT = "medium"


class TurnMaker:
    """Makes turns for one server."""

    def __init__(
        self,
        config: FrontendConfig,
        client: EngineClient,
        jobs: JobMaker,
        metrics: Metrics,
        *,
        store: Store,
        sealer: Sealer,
    ) -> None:
        self._config = config
        self._client = client
        self._jobs = jobs
        self._metrics = metrics
        self._store = store
        self._sealer = sealer

    async def turn(
        self, request: ResponsesRequest, status: EngineStatus, *, owner: str, num_bytes: int
    ) -> Turn:
        """Return the turn of a request; `owner` is the name of its key, `num_bytes` the size of its body.

        Raises  RequestError where the conversation is not to be had, cannot be rendered or does not fit.
        """
        is_stored = self._is_stored(request)
        mode = resolve_mode(self._config.reasoning, request.reasoning_mode)
        constraint = await self._constraint(request)
        response_id = new_id(RESPONSE_PREFIX)
        context = resolve(request, response_id, self._store, self._sealer, owner=owner)
        room = _room(request, status)
        prompt, context = await self._encode(request, context, room, num_bytes)
        ask = Ask(
            endpoint="responses",
            answer_id=response_id,
            prompt_param="input",
            limit=request.max_output_tokens,
            limit_param="max_output_tokens",
            logprobs=response_logprobs(request),
            max_calls=1 if request.parallel_tool_calls is False else None,
            calls_as_text=request.tool_choice == "none",
            reasoning=mode,
            is_separate=True,
            constraint=constraint,
        )
        job = self._jobs.converse(request, prompt, status, ask)
        writer = ResponseWriter(
            job,
            _body(request, job, is_stored=is_stored),
            with_summary=_summary(request) is not None,
            is_hidden=mode == "hidden",
            seal=self._seal(request, job),
        )
        return Turn(
            self._client,
            job,
            writer,
            context,
            store=self._store,
            metrics=self._metrics,
            owner=owner,
            is_hidden=mode == "hidden",
            is_debug=mode == "debug",
        )

    async def input_tokens(
        self, request: ResponsesRequest, status: EngineStatus, *, owner: str, num_bytes: int
    ) -> int:
        """Return how many tokens the prompt of a request has.

        Raises  RequestError as `turn` does.
        """
        await self._constraint(request)  # what cannot be asked for has no number of tokens
        response_id = new_id(RESPONSE_PREFIX)
        context = resolve(request, response_id, self._store, self._sealer, owner=owner)
        room = status.context_tokens - status.context_tokens // LEFT_FOR_ANSWER
        prompt, _ = await self._encode(request, context, room, num_bytes)
        return len(prompt.token_ids)

    async def _constraint(self, request: ResponsesRequest) -> Constraint | None:
        tools = [tool for tool in request.tools or [] if tool["type"] == "function"]
        spaces = [tool for tool in request.tools or [] if tool["type"] == "namespace"]
        inner = [{**t, "name": f"{n['name']}.{t['name']}"} for n in spaces for t in n["tools"]]
        return await self._jobs.constraint(
            tools=[*tools, *inner],
            tool_choice=request.tool_choice,
            answer_format=request.text.format if request.text else None,
            format_param="text.format",
        )

    async def _encode(
        self, request: ResponsesRequest, context: Context, room: int, num_bytes: int
    ) -> tuple[EncodedPrompt, Context]:
        """Render the conversation; with truncation=auto as much of its end as `room` tokens hold."""
        num_bytes = max(num_bytes, len(encode(context.items)))  # what is stored counts too
        prompt = await self._jobs.encode(body_of(request, context), num_bytes=num_bytes)
        if request.truncation != "auto" or len(prompt.token_ids) <= room:
            return prompt, context
        # The least to leave out, by halving: each try renders the conversation once.
        cuts = context.cuts()
        low, high = 0, len(cuts)
        while low < high:
            middle = (low + high) // 2
            shorter = context.without(cuts[middle])
            tried = await self._jobs.encode(body_of(request, shorter), num_bytes=num_bytes)
            if len(tried.token_ids) <= room:
                prompt, high = tried, middle
            else:
                low = middle + 1
        # Where even the last step does not fit, the whole conversation is refused with its numbers.
        return prompt, context.without(cuts[low]) if low < len(cuts) else context

    def _is_stored(self, request: ResponsesRequest) -> bool:
        if not isinstance(self._store, NoStore):
            return request.store is not False
        for name in ("store", "background"):
            if getattr(request, name):
                raise RequestError(
                    "unsupported_value",
                    f"{name}=true: this server stores no responses (--response-store none); allowed: false; leave it "
                    "out",
                    param=name,
                )
        return False

    def _seal(self, request: ResponsesRequest, job: Job) -> Callable[[int], str | None] | None:
        if ENCRYPTED_REASONING not in (request.include or []):
            return None

        def seal(place: int) -> str | None:
            messages = job.runs[0].answer().messages
            return self._sealer.seal(messages[place].content) if place < len(messages) else None

        return seal


def _room(request: ResponsesRequest, status: EngineStatus) -> int:
    """Return how many tokens a prompt may have that is to be cut."""
    context = status.context_tokens
    return context - (request.max_output_tokens or context // LEFT_FOR_ANSWER)


def _summary(request: ResponsesRequest) -> str | None:
    reasoning = request.reasoning
    return (reasoning.summary or reasoning.generate_summary) if reasoning else None


def _body(request: ResponsesRequest, job: Job, *, is_stored: bool) -> ResponseBody:
    effort = request.reasoning.effort if request.reasoning else None
    return ResponseBody(
        id=job.answer_id,
        created_at=job.created,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=job.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_retention=request.prompt_cache_retention,
        reasoning={"effort": effort or DEFAULT_EFFORT, "summary": _summary(request)},
        safety_identifier=request.safety_identifier,
        store=is_stored,
        temperature=1.0 if request.temperature is None else request.temperature,
        text=_text(request),
        tool_choice=request.tool_choice or "auto",
        tools=read_tools(request),
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
        metadata=request.metadata or {},
    )


def _text(request: ResponsesRequest) -> dict[str, Any]:
    asked = request.text.format if request.text else None
    return {"format": asked or {"type": "text"}, "verbosity": "medium"}
