"""One client request as a job: engine requests going in, pieces of each choice coming out.

Chat and completions, streamed or not, all run through `pieces`; what differs is how pieces are written
(`chat.py`, `completions.py`). Knows events and deltas, no HTTP.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from rose.frontend.client import EngineClient, RequestEvent, Submission
from rose.frontend.errors import RequestError
from rose.frontend.formatters.base import Answer, AnswerDecoder, Delta
from rose.frontend.logprobs import ContentLogprobs
from rose.frontend.metrics import Metrics
from rose.frontend.reasoning import ReasoningMode, shown
from rose.frontend.schemas import CompletionDetails, PromptDetails, SamplingFields, Usage
from rose.frontend.stops import StopStrings
from rose.protocol.event import EngineStatus, ErrorEvent, FinishedEvent, TokensEvent
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams

Plain = Callable[[Sequence[int]], list[str]]
SEED_RANGE = 2**63
SAMPLING_NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "min_tokens",
)
"""Fields that a request and SamplingParams share."""


class ChoiceRun:
    """One choice while it is generated: decoder, stop strings and counts of its own."""

    def __init__(
        self,
        index: int,
        decoder: AnswerDecoder,
        *,
        prompt: int = 0,
        stop_strings: Sequence[str] = (),
        max_calls: int | None = None,
        calls_as_text: bool = False,
        logprobs: ContentLogprobs | None = None,
        reasoning: ReasoningMode = "visible",
        is_separate: bool = False,
        echo: str = "",
    ) -> None:
        self.index = index
        self.prompt = prompt
        """Place of its prompt among those of the request; n choices share one."""
        self.finish_reason: str | None = None
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.num_reasoning_tokens = 0
        self.recoveries: list[str] = []
        self.decoder = decoder
        self._stops = StopStrings(stop_strings)
        self._max_calls = max_calls
        self._calls_as_text = calls_as_text
        self._logprobs = logprobs
        self._reasoning: ReasoningMode = reasoning
        self._echo = echo
        """Text still to be sent before the answer's; no stop string is searched in it."""
        self._passes_all = not stop_strings and max_calls is None and not calls_as_text
        self._is_simple = self._passes_all and logprobs is None and reasoning == "visible"
        self.plain: Plain | None = None
        """`AnswerDecoder.plain` once the answer has begun, where tokens may go the short way at all. Who takes it adds
        to `num_output_tokens`."""
        if reasoning == "debug":
            decoder.reveal()
        if is_separate:
            decoder.separate()

    def take(self, event: TokensEvent) -> list[Delta]:
        """Take tokens; return what they add to the answer. `finish_reason` is set where they end it early."""
        self.num_output_tokens += len(event.token_ids)
        if event.num_cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = event.num_cached_tokens
        if self._logprobs is not None and event.logprobs is not None:
            deltas = self._take_scored(self._logprobs, event)
        else:
            deltas = self._filter(self.decoder.push(event.token_ids))
        if self.finish_reason is not None:
            self._close("stop")
        elif self._is_simple:
            self.plain = self.decoder.plain
        return self._echoed(shown(deltas, self._reasoning))

    def finish(self, reason: str) -> list[Delta]:
        """Take the engine's end; return what was held back."""
        raw = self._close(reason)
        deltas = self._filter(raw)
        if self.finish_reason is None:
            held = self._stops.finish()
            deltas += [Delta(kind="content", text=held)] if held else []
            reason = self.decoder.answer().finish_reason
            is_hidden_call = self._calls_as_text and reason == "tool_calls"
            self.finish_reason = "stop" if is_hidden_call else reason
        if self._logprobs is not None:
            self._attach(self._logprobs, raw, deltas)
        return self._echoed(shown(deltas, self._reasoning))

    def _echoed(self, deltas: list[Delta]) -> list[Delta]:
        if not self._echo:
            return deltas
        echo, self._echo = self._echo, ""
        return [Delta(kind="content", text=echo), *deltas]

    def answer(self) -> Answer:
        """Return everything so far as the decoder has it: nothing hidden, nothing cut."""
        return self.decoder.answer()

    def _take_scored(self, logprobs: ContentLogprobs, event: TokensEvent) -> list[Delta]:
        """Take tokens one by one, so that each is known by the text it brought."""
        deltas: list[Delta] = []
        for token_id, entry in zip(event.token_ids, event.logprobs or (), strict=True):
            logprobs.take(token_id, entry)
            raw = self.decoder.push([token_id])
            passed = self._filter(raw)
            self._attach(logprobs, raw, passed)
            deltas += passed
            if self.finish_reason is not None:
                break
        return deltas

    def _attach(self, logprobs: ContentLogprobs, raw: list[Delta], passed: list[Delta]) -> None:
        """Give the last piece of content that passed the log-probabilities of what has been sent."""
        calls = [d for d in raw if d.kind in ("tool_call", "tool_arguments")]
        content = [d for d in passed if d.kind == "content"]
        logprobs.follow(
            num_foreign=sum(len(_call_as_text(d).text) for d in calls)
            if self._calls_as_text
            else 0,
            num_sent=sum(len(d.text) for d in content),
        )
        scores = logprobs.ready(is_end=self.finish_reason is not None)
        if scores and not content:
            content.append(Delta(kind="content"))
            passed.append(content[-1])
        if scores:
            content[-1].scores += scores

    def _close(self, reason: str) -> list[Delta]:
        rest = self.decoder.finish(reason)
        answer = self.decoder.answer()
        self.num_reasoning_tokens = answer.num_reasoning_tokens
        self.recoveries = answer.recoveries
        return rest

    def _filter(self, deltas: list[Delta]) -> list[Delta]:
        """Cut at a stop string in content, and before a call beyond the allowed number."""
        if self._passes_all:
            return deltas
        passed: list[Delta] = []
        for delta in map(_call_as_text, deltas) if self._calls_as_text else deltas:
            if delta.kind == "content":
                text = self._stops.push(delta.text)
                passed += [Delta(kind="content", text=text)] if text else []
                if self._stops.matched is not None:
                    self.finish_reason = "stop"
                    return passed
                continue
            if delta.kind in ("message", "message_text"):
                passed.append(delta)
                continue
            # A stop string does not reach over reasoning or a call: release what was held.
            held = self._stops.finish()
            passed += [Delta(kind="content", text=held)] if held else []
            if (
                self._max_calls is not None
                and delta.kind == "tool_call"
                and delta.index >= self._max_calls
            ):
                self.finish_reason = "tool_calls"
                return passed
            passed.append(delta)
        return passed


def _call_as_text(delta: Delta) -> Delta:
    """Turn a call that the client has forbidden (tool_choice none) into text; nothing written is lost."""
    if delta.kind == "tool_call":
        return Delta(kind="content", text=f"{delta.name} ")
    if delta.kind == "tool_arguments":
        return Delta(kind="content", text=delta.text)
    return delta


class Piece(Struct, frozen=True, kw_only=True):
    """What one event added to one choice."""

    index: int
    deltas: list[Delta]
    finish_reason: str | None = None
    """Set on the last piece of the choice."""


@dataclass(slots=True, kw_only=True)
class Job:
    """Everything about one client request that its answer needs."""

    endpoint: str
    answer_id: str
    model: str
    created: int
    num_prompt_tokens: int
    requests: list[Request]
    runs: list[ChoiceRun]
    """One per request, in the same order."""
    is_stream: bool
    with_usage: bool = False
    """Send a usage chunk at the end of the stream."""
    with_logprobs: bool = False
    started: float = field(default_factory=time.monotonic)

    def usage(self) -> Usage:
        """Return the tokens so far, over all choices."""
        completion = sum(run.num_output_tokens for run in self.runs)
        cached: dict[int, int] = {}
        for run in self.runs:
            cached[run.prompt] = max(cached.get(run.prompt, 0), run.num_cached_tokens)
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=completion,
            total_tokens=self.num_prompt_tokens + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=sum(cached.values())),
            completion_tokens_details=CompletionDetails(
                reasoning_tokens=sum(run.num_reasoning_tokens for run in self.runs)
            ),
        )


def new_id(prefix: str) -> str:
    """Return an id nobody else has."""
    return f"{prefix}{uuid.uuid4().hex}"


def sampling_params(
    fields: SamplingFields, choice: int, *, vocab_size: int, logprobs: int | None = None
) -> SamplingParams:
    """Return how to choose the tokens of one choice; choices after the first get the seeds after `seed`.

    Raises  RequestError for a value out of range.
    """
    given: dict[str, Any] = {
        name: value for name in SAMPLING_NUMBERS if (value := getattr(fields, name)) is not None
    }
    given["logprobs"] = logprobs
    if fields.logit_bias:
        given["logit_bias"] = _biases(fields.logit_bias, vocab_size)
    if given.get("top_k") == -1:
        given["top_k"] = 0  # the other common way to write "all"
    params = SamplingParams(**given, seed=fields.seed)
    problems = params.problems()
    if problems:
        raise RequestError(
            "invalid_request", "; ".join(problems), param=re.split("[= ]", problems[0])[0]
        )
    if fields.seed is None or choice == 0:
        return params
    seed = (fields.seed + choice + SEED_RANGE) % (2 * SEED_RANGE) - SEED_RANGE
    return SamplingParams(**given, seed=seed)


def _biases(asked: dict[str, float], vocab_size: int) -> dict[int, float]:
    """Return the biases by token id; JSON has names only.

    Raises  RequestError naming the first that is no id of the vocabulary.
    """
    biases = {}
    for name, bias in asked.items():
        # length first: int() of many digits is slow, and raises
        if not (len(name) <= 9 and name.isascii() and name.isdigit() and int(name) < vocab_size):
            raise RequestError(
                "invalid_request",
                f"logit_bias has {name[:40]!r}; allowed: token ids from 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        biases[int(name)] = bias
    return biases


def token_budget(
    num_prompt_tokens: int,
    asked: int | None,
    status: EngineStatus,
    *,
    prompt_param: str,
    limit_param: str,
) -> int:
    """Return how many tokens may be generated; None asks for all that fit.

    Raises  RequestError with the numbers where prompt or prompt and answer pass the context length.
    """
    context = status.context_tokens
    room = context - num_prompt_tokens
    if room < 1:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {num_prompt_tokens} tokens; this model's context length is {context} tokens, "
            f"prompt and answer together; allowed: {context - 1} prompt tokens; shorten the {prompt_param}",
            param=prompt_param,
        )
    if asked is None:
        return room
    if asked < 1:
        raise RequestError(
            "invalid_request", f"{limit_param}={asked}; allowed: 1 or more", param=limit_param
        )
    if asked > room:
        raise RequestError(
            "context_length_exceeded",
            f"{limit_param}={asked} and a prompt of {num_prompt_tokens} tokens need {asked + num_prompt_tokens}; "
            f"this model's context length is {context} tokens; allowed: {limit_param} up to {room} here; "
            f"lower it, leave it out or shorten the {prompt_param}",
            param=limit_param,
        )
    return asked


def check_token_ids(token_ids: Sequence[int], status: EngineStatus, param: str) -> None:
    """Refuse ids outside the vocabulary.

    Raises  RequestError naming the first one.
    """
    for token_id in token_ids:
        if not 0 <= token_id < status.vocab_size:
            raise RequestError(
                "invalid_request",
                f"{param} has token id {token_id}; allowed: 0 to {status.vocab_size - 1}",
                param=param,
            )


async def pieces(client: EngineClient, job: Job, metrics: Metrics) -> AsyncGenerator[Piece, None]:
    """Run a job and yield each choice's pieces as they come; closing the iterator aborts what still runs.

    Raises  RequestError where the engine refuses or fails; pieces already yielded stay true.
    """
    maker = PieceMaker(job, metrics)
    async with client.submit(*job.requests) as events:
        async for event in events:
            assert not isinstance(event, bytes), "only a shortcut leaves bytes"
            piece = maker.take(event, events)
            if piece is not None:
                yield piece


class PieceMaker:
    """Events of one job to pieces, one by one: what `pieces` does, for who waits for the events himself."""

    def __init__(self, job: Job, metrics: Metrics) -> None:
        pairs = zip(job.requests, job.runs, strict=True)
        self.runs = {request.request_id: run for request, run in pairs}
        self.watch = metrics.watch(job.started)

    def take(self, event: RequestEvent, events: Submission) -> Piece | None:
        """Return what an event adds, if anything; a request whose answer is complete early is aborted.

        Raises  RequestError where the engine refuses or fails.
        """
        if isinstance(event, ErrorEvent):
            raise RequestError.of_event(event)
        run = self.runs[event.request_id]
        if run.finish_reason is not None:
            return None  # it ended early, and this had come before the engine knew
        if isinstance(event, FinishedEvent):
            return _last_piece(run, event)
        self.watch.tokens(event.request_id, len(event.token_ids))
        is_first = run.num_output_tokens == 0
        deltas = run.take(event)
        if run.finish_reason is not None:
            events.abort(event.request_id)
        # The first tokens open the answer even where they are a header without text.
        if deltas or is_first or run.finish_reason is not None:
            return Piece(index=run.index, deltas=deltas, finish_reason=run.finish_reason)
        return None


def _last_piece(run: ChoiceRun, event: FinishedEvent) -> Piece:
    if event.reason == "abort":
        raise RequestError("engine_failed", "the engine stopped this request before it was done")
    deltas = run.finish(event.reason)
    return Piece(index=run.index, deltas=deltas, finish_reason=run.finish_reason)
