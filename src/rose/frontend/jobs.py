"""Checked request bodies -> jobs: render the prompt, check it against the engine, make the engine's requests."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from rose.frontend.body import INLINE_BODY_BYTES
from rose.frontend.config import FrontendConfig
from rose.frontend.errors import RequestError
from rose.frontend.formatters.base import AnswerDecoder, EncodedPrompt, FormatError, Formatter
from rose.frontend.generation import (
    ChoiceRun,
    Job,
    check_token_ids,
    new_id,
    sampling_params,
    token_budget,
)
from rose.frontend.logprobs import ContentLogprobs
from rose.frontend.parsing import (
    chat_logprobs,
    completion_logprobs,
    completion_prompts,
    quoted,
    stop_strings,
)
from rose.frontend.reasoning import require_open_tokens, resolve_mode
from rose.frontend.schemas import ChatRequest, CompletionRequest, SamplingFields
from rose.protocol.event import EngineStatus
from rose.protocol.request import Request

COMPLETION_DEFAULT_TOKENS = 16
"""OpenAI's default of max_tokens on /v1/completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formatters:
    """The prompt formats of the two endpoints."""

    chat: Formatter
    text: Formatter
    """Raw text and token ids, for completions."""


class JobMaker:
    """Makes jobs for one served model."""

    def __init__(
        self, config: FrontendConfig, formatters: Formatters, *, model_names: tuple[str, ...]
    ) -> None:
        self._config = config
        self._formatters = formatters
        self.model_names = model_names
        """The first is the one answers carry."""

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
        conversation = self._conversation(request, body)
        formatter = self._formatters.chat
        prompt = await _encode(formatter, conversation, num_bytes)
        limit_param = (
            "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        )
        budget = token_budget(
            len(prompt.token_ids),
            getattr(request, limit_param),
            status,
            prompt_param="messages",
            limit_param=limit_param,
        )
        mode = resolve_mode(
            self._config.reasoning, request.reasoning_mode, include=request.include_reasoning
        )
        logprobs = chat_logprobs(request)
        decoders = [
            formatter.decoder(declared_tools=prompt.declared_tools) for _ in range(request.n or 1)
        ]
        runs = [
            ChoiceRun(
                index,
                decoder,
                stop_strings=stop_strings(request),
                max_calls=1 if request.parallel_tool_calls is False else None,
                calls_as_text=request.tool_choice == "none",
                reasoning=mode,
                logprobs=_tracked(formatter, decoder, logprobs),
            )
            for index, decoder in enumerate(decoders)
        ]
        job = self._job(request, "chat", "chatcmpl-", [prompt], runs)
        _add_requests(job, request, [prompt], [budget], status, logprobs)
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
            check_token_ids(prompt, status, "prompt")
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
                stop_strings=stop_strings(request),
                logprobs=_tracked(formatter, decoder, logprobs),
            )
            for index, decoder in enumerate(decoders)
        ]
        job = self._job(request, "completions", "cmpl-", prompts, runs)
        _add_requests(job, request, prompts, budgets, status, logprobs)
        return job

    def _conversation(self, request: ChatRequest, body: dict[str, Any]) -> dict[str, Any]:
        conversation = {**body, "api": "chat"}
        conversation.pop("conversation_date", None)
        date = self._config.date_of_now()
        if date is not None:
            conversation["conversation_date"] = date
        if request.tool_choice == "none":
            # A model that is told of no tool calls none.
            conversation.pop("tools", None)
            conversation.pop("tool_choice", None)
        return conversation

    def _job(
        self,
        request: SamplingFields,
        endpoint: str,
        prefix: str,
        prompts: list[EncodedPrompt],
        runs: list[ChoiceRun],
    ) -> Job:
        options = request.stream_options
        return Job(
            endpoint=endpoint,
            answer_id=new_id(prefix),
            model=self.model_names[0],
            created=int(time.time()),
            num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            requests=[],
            runs=runs,
            is_stream=bool(request.stream),
            with_usage=bool(options and options.include_usage),
        )


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
            )
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
