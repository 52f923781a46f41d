"""Checked request bodies -> jobs: render the prompt, check it against the engine, make the engine's requests."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from rose.frontend.body import INLINE_BODY_BYTES
from rose.frontend.config import FrontendConfig
from rose.frontend.errors import RequestError
from rose.frontend.formatters.base import AnswerDecoder, EncodedPrompt, FormatError, Formatter
from rose.frontend.formatters.shape import AnswerShape
from rose.frontend.generation import (
    ChoiceRun,
    Job,
    check_token_ids,
    new_id,
    sampling_params,
    token_budget,
)
from rose.frontend.grammar.build import GrammarBuilder
from rose.frontend.grammar.schema import SchemaLimits
from rose.frontend.grammar.shape import answer_shape, is_free
from rose.frontend.logprobs import ContentLogprobs
from rose.frontend.parsing import (
    chat_logprobs,
    completion_logprobs,
    completion_prompts,
    quoted,
    stop_strings,
)
from rose.frontend.reasoning import ReasoningMode, require_open_tokens, resolve_mode
from rose.frontend.schemas import ChatRequest, CompletionRequest, SamplingFields
from rose.frontend.token_answers import TokenRun
from rose.frontend.token_schemas import TokenRequest
from rose.protocol.event import EngineStatus
from rose.protocol.grammar import Constraint
from rose.protocol.request import Request, problems_of_limits

ANSWER_SHARE = 4
"""Where an answer in a given form must come, this part of the tokens is kept for it: reasoning ends before. A guess."""
MAX_ANSWER_TOKENS = 4096
"""Most tokens so kept."""
COMPLETION_DEFAULT_TOKENS = 16
"""OpenAI's default of max_tokens on /v1/completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formatters:
    """The prompt formats of the two endpoints."""

    chat: Formatter
    text: Formatter
    """Raw text and token ids, for completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a request to continue a conversation wants, whichever API it came by."""

    endpoint: str
    """In metrics."""
    answer_id: str
    prompt_param: str
    """The field that holds the conversation."""
    limit: int | None
    """Most tokens to generate; None: all that fit."""
    limit_param: str
    logprobs: int | None = None
    """Alternatives per token; None: no log-probabilities."""
    num_choices: int = 1
    max_calls: int | None = None
    calls_as_text: bool = False
    reasoning: ReasoningMode = "visible"
    is_separate: bool = False
    """Keep the messages of the answer apart."""
    with_usage: bool = False
    """Send a chunk with the usage."""
    constraint: Constraint | None = None
    """What `JobMaker.constraint` made of tools and formats."""


class JobMaker:
    """Makes jobs for one served model."""

    def __init__(
        self, config: FrontendConfig, formatters: Formatters, *, model_names: tuple[str, ...]
    ) -> None:
        self._config = config
        self._formatters = formatters
        self.model_names = model_names
        """The first is the one answers carry."""
        self.grammars = GrammarBuilder(formatters.chat, build_seconds=config.grammar_build_seconds)

    @property
    def text_formatter(self) -> Formatter:
        """The format of raw text."""
        return self._formatters.text

    def check_model(self, name: str) -> None:
        """Refuse names that are not served.

        Raises  RequestError with the names that are.
        """
        if name not in self.model_names:
            raise RequestError(
                "model_not_found",
                f"model {quoted(name)} is not served here; served: {', '.join(self.model_names)}",
                param="model",
            )

    async def chat(
        self, request: ChatRequest, body: dict[str, Any], status: EngineStatus, *, num_bytes: int
    ) -> Job:
        """Return the job of a chat request; `body` is what `request` was read from.

        Raises  RequestError where the conversation cannot be rendered or does not fit.
        """
        limit_param = (
            "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        )
        ask = Ask(
            endpoint="chat",
            answer_id=new_id("chatcmpl-"),
            prompt_param="messages",
            limit=getattr(request, limit_param),
            limit_param=limit_param,
            logprobs=chat_logprobs(request),
            num_choices=request.n or 1,
            max_calls=1 if request.parallel_tool_calls is False else None,
            calls_as_text=request.tool_choice == "none",
            reasoning=resolve_mode(
                self._config.reasoning, request.reasoning_mode, include=request.include_reasoning
            ),
            with_usage=bool(request.stream_options and request.stream_options.include_usage),
            constraint=await self.constraint(
                tools=request.tools,
                tool_choice=request.tool_choice,
                answer_format=request.response_format,
                format_param="response_format",
            ),
        )
        prompt = await self.encode({**body, "api": "chat"}, num_bytes=num_bytes)
        return self.converse(request, prompt, status, ask)

    async def constraint(
        self, *, tools: list[Any] | None, tool_choice: Any, answer_format: Any, format_param: str
    ) -> Constraint | None:
        """Return what holds an answer to the form that a request asks for; None where it asks for none.

        Units    as in `answer_shape`: tools of either API; `response_format` or `text.format`, and that name
        Raises   RequestError for what is wrong or cannot be enforced
        """
        if is_free(tools=tools, tool_choice=tool_choice, answer_format=answer_format):
            return None

        def read() -> tuple[AnswerShape, str]:
            shape = answer_shape(
                tools=tools,
                tool_choice=tool_choice,
                answer_format=answer_format,
                format_param=format_param,
                limits=SchemaLimits(max_bytes=self._config.max_schema_bytes),
            )
            if shape.content is not None:
                return shape, format_param
            return shape, "tool_choice" if shape.must_call or shape.is_limited else "tools"

        return await self.grammars.constraint(read)

    async def encode(self, conversation: dict[str, Any], *, num_bytes: int) -> EncodedPrompt:
        """Render a conversation with the day of now; `num_bytes` is the size of the body it came in.

        Raises  RequestError where it cannot be rendered.
        """
        conversation["call_header"] = self._config.call_header
        conversation.pop("conversation_date", None)
        date = self._config.date_of_now()
        if date is not None:
            conversation["conversation_date"] = date
        if conversation.get("tool_choice") == "none":
            # A model that is told of no tool calls none.
            conversation.pop("tools", None)
            conversation.pop("namespaces", None)
            conversation.pop("tool_choice", None)
        return await _encode(self._formatters.chat, conversation, num_bytes)

    def converse(
        self, request: SamplingFields, prompt: EncodedPrompt, status: EngineStatus, ask: Ask
    ) -> Job:
        """Return the job that continues a rendered conversation.

        Raises  RequestError where it does not fit.
        """
        budget = token_budget(
            len(prompt.token_ids),
            ask.limit,
            status,
            prompt_param=ask.prompt_param,
            limit_param=ask.limit_param,
        )
        formatter = self._formatters.chat
        decoders = [
            formatter.decoder(declared_tools=prompt.declared_tools) for _ in range(ask.num_choices)
        ]
        runs = [
            ChoiceRun(
                index,
                decoder,
                stop_strings=stop_strings(request),
                max_calls=ask.max_calls,
                calls_as_text=ask.calls_as_text,
                reasoning=ask.reasoning,
                is_separate=ask.is_separate,
                logprobs=_tracked(formatter, decoder, ask.logprobs),
            )
            for index, decoder in enumerate(decoders)
        ]
        job = self._job(request, ask.endpoint, ask.answer_id, [prompt], runs)
        job.with_usage = ask.with_usage
        _add_requests(job, request, [prompt], [budget], status, ask.logprobs)
        if ask.constraint is not None:
            _check_with_constraint(request)
            late_after = budget - min(budget // ANSWER_SHARE, MAX_ANSWER_TOKENS)
            constraint = msgspec.structs.replace(ask.constraint, late_after=late_after)
            job.requests = [msgspec.structs.replace(r, constraint=constraint) for r in job.requests]
        return job

    async def completion(
        self, request: CompletionRequest, status: EngineStatus, *, num_bytes: int
    ) -> Job:
        """Return the job of a completion request: n choices for each prompt.

        Raises  RequestError where a prompt cannot be encoded or does not fit.
        """
        require_open_tokens(self._config.reasoning, "/v1/completions")
        formatter = self._formatters.text
        asked = COMPLETION_DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
        prompts, budgets = [], []
        for text in completion_prompts(request):
            prompt = await _encode(formatter, {"prompt": text}, num_bytes)
            check_token_ids(prompt.token_ids, status, "prompt")
            prompts.append(prompt)
            budgets.append(
                token_budget(
                    len(prompt.token_ids),
                    asked,
                    status,
                    prompt_param="prompt",
                    limit_param="max_tokens",
                )
            )
        count = request.n or 1
        logprobs = completion_logprobs(request)
        decoders = [formatter.decoder() for _ in range(len(prompts) * count)]
        runs = [
            ChoiceRun(
                index,
                decoder,
                prompt=index // count,
                echo=_text_of(formatter, prompts[index // count]) if request.echo else "",
                stop_strings=stop_strings(request),
                logprobs=_tracked(formatter, decoder, logprobs),
            )
            for index, decoder in enumerate(decoders)
        ]
        job = self._job(request, "completions", new_id("cmpl-"), prompts, runs)
        job.with_usage = bool(request.stream_options and request.stream_options.include_usage)
        _add_requests(job, request, prompts, budgets, status, logprobs)
        return job

    def tokens(self, request: TokenRequest, status: EngineStatus) -> Job:
        """Return the job of a request in token ids.

        Raises  RequestError where the ids are not the model's or do not fit.
        """
        require_open_tokens(self._config.reasoning, "/v1/generate")
        stops = request.stop_token_ids
        if stops is None:
            stops = self._formatters.text.encode({"prompt": [0]}).stop_token_ids
        prompt = EncodedPrompt(token_ids=request.prompt_token_ids, stop_token_ids=stops)
        if not prompt.token_ids:
            raise RequestError(
                "invalid_request",
                "prompt_token_ids is empty; give at least one",
                param="prompt_token_ids",
            )
        check_token_ids(prompt.token_ids, status, "prompt_token_ids")
        check_token_ids(stops, status, "stop_token_ids")
        budget = token_budget(
            len(prompt.token_ids),
            request.max_tokens,
            status,
            prompt_param="prompt_token_ids",
            limit_param="max_tokens",
        )
        runs: list[ChoiceRun] = [TokenRun(index) for index in range(request.n or 1)]
        job = self._job(request, "generate", new_id("gen-"), [prompt], runs)
        job.with_usage = bool(request.stream_options and request.stream_options.include_usage)
        _add_requests(job, request, [prompt], [budget], status, request.logprobs)
        return job

    def _job(
        self,
        request: SamplingFields,
        endpoint: str,
        answer_id: str,
        prompts: list[EncodedPrompt],
        runs: list[ChoiceRun],
    ) -> Job:
        return Job(
            endpoint=endpoint,
            answer_id=answer_id,
            model=self.model_names[0],
            created=int(time.time()),
            num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            requests=[],
            runs=runs,
            is_stream=bool(request.stream),
        )


def _text_of(formatter: Formatter, prompt: EncodedPrompt) -> str:
    """Return a prompt as its answer would be shown: control tokens left out."""
    decoder = formatter.decoder()
    deltas = [*decoder.push(prompt.token_ids), *decoder.finish("stop")]
    return "".join(delta.text for delta in deltas)


def _tracked(
    formatter: Formatter, decoder: AnswerDecoder, logprobs: int | None
) -> ContentLogprobs | None:
    if logprobs is None:
        return None
    return ContentLogprobs(decoder.track(), formatter.token_bytes)


def _add_requests(
    job: Job,
    request: SamplingFields,
    prompts: list[EncodedPrompt],
    budgets: list[int],
    status: EngineStatus,
    logprobs: int | None,
) -> None:
    job.with_logprobs = logprobs is not None
    _check_limits(request)
    for run in job.runs:
        prompt = prompts[run.prompt]
        _check_minimum(request, budgets[run.prompt])
        job.requests.append(
            Request(
                request_id=f"{job.answer_id}-{run.index}",
                prompt_token_ids=prompt.token_ids,
                max_tokens=budgets[run.prompt],
                sampling=sampling_params(
                    request, run.index, vocab_size=status.vocab_size, logprobs=logprobs
                ),
                stop_token_ids=[] if request.ignore_eos else prompt.stop_token_ids,
                cache_salt=request.cache_salt or "",
                priority=request.priority or 0,
                timeout_s=request.timeout,
            )
        )


def _check_limits(request: SamplingFields) -> None:
    problems = problems_of_limits(priority=request.priority or 0, timeout_s=request.timeout)
    if problems:
        raise RequestError(
            "invalid_request", "; ".join(problems), param=problems[0].partition("=")[0]
        )


def _check_with_constraint(request: SamplingFields) -> None:
    """Refuse what would keep an answer of a given form from ending."""
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request, name):
            raise RequestError(
                "invalid_request",
                f"{name}={getattr(request, name)} keeps the answer from ending where response_format, tool_choice or "
                f"strict tools say that it is complete; leave {name} out",
                param=name,
            )


def _check_minimum(request: SamplingFields, budget: int) -> None:
    minimum = request.min_tokens
    if minimum is not None and minimum > budget:
        raise RequestError(
            "invalid_request",
            f"min_tokens={minimum} passes the {budget} tokens that may be generated; lower it or raise max_tokens",
            param="min_tokens",
        )


async def _encode(
    formatter: Formatter, conversation: dict[str, Any], num_bytes: int
) -> EncodedPrompt:
    try:
        if num_bytes > INLINE_BODY_BYTES:
            prompt = await asyncio.to_thread(formatter.encode, conversation)
        else:
            prompt = formatter.encode(conversation)
    except FormatError as error:
        raise RequestError.of_format(error) from error
    if not prompt.token_ids:
        raise RequestError(
            "invalid_request", "the prompt has no tokens; give some text", param="prompt"
        )
    return prompt
