"""Checked request bodies -> jobs: render the prompt, check it against the engine, make the engine's requests."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from rose.frontend.body import INLINE_BODY_BYTES
from rose.frontend.config import FrontendConfig
from rose.frontend.errors import RequestError
from rose.frontend.formatters.base import EncodedPrompt, FormatError, Formatter
from rose.frontend.generation import (
    ChoiceRun,
    Job,
    check_token_ids,
    new_id,
    sampling_params,
    token_budget,
)
from rose.frontend.parsing import completion_prompts, quoted, stop_strings
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
        runs = [
            ChoiceRun(
                index,
                formatter.decoder(declared_tools=prompt.declared_tools),
                stop_strings=stop_strings(request),
                max_calls=1 if request.parallel_tool_calls is False else None,
                calls_as_text=request.tool_choice == "none",
            )
            for index in range(request.n or 1)
        ]
        job = self._job(request, "chat", "chatcmpl-", [prompt], runs)
        _add_requests(job, request, [prompt], [budget])
        return job

    async def completion(
        self, request: CompletionRequest, status: EngineStatus, *, num_bytes: int
    ) -> Job:
        """Return the job of a completion request: n choices for each prompt.

        Raises  RequestError where a prompt cannot be encoded or does not fit.
        """
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
        runs = [
            ChoiceRun(
                place * count + choice,
                formatter.decoder(),
                prompt=place,
                stop_strings=stop_strings(request),
            )
            for place in range(len(prompts))
            for choice in range(count)
        ]
        job = self._job(request, "completions", "cmpl-", prompts, runs)
        _add_requests(job, request, prompts, budgets)
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


def _add_requests(
    job: Job, request: SamplingFields, prompts: list[EncodedPrompt], budgets: list[int]
) -> None:
    for run in job.runs:
        prompt = prompts[run.prompt]
        job.requests.append(
            Request(
                request_id=f"{job.answer_id}-{run.index}",
                prompt_token_ids=prompt.token_ids,
                max_tokens=budgets[run.prompt],
                sampling=sampling_params(request, run.index),
                stop_token_ids=prompt.stop_token_ids,
            )
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
