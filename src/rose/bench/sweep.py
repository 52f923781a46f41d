"""Latency of prefill and decode, measured through the public engine: token ids on the host at both ends.

Prefill: from `add` of a prompt never seen before to its first token. Decode: the batch is prefilled for real,
then steps are timed from the moment every sequence has its first token; 96 steps, each giving one token to
every sequence, sampled at temperature 1 so that the sequences differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rose.engine.engine import LLMEngine
from rose.protocol.event import ErrorEvent, FinishedEvent, TokensEvent
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams
from rose.utils.math import ceil_div

DECODE_STEPS = 96


@dataclass(slots=True)
class PromptSource:
    """Random prompts; no two share a beginning, so that no cache can help."""

    vocab_size: int
    seed: int = 0
    _random: np.random.Generator = field(init=False)
    _count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def request(self, num_tokens: int, max_tokens: int) -> Request:
        """Return a request with a fresh prompt that never stops early."""
        self._count += 1
        prompt = self._random.integers(0, self.vocab_size, num_tokens).tolist()
        return Request(
            request_id=f"bench-{self._count}",
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=1.0, seed=self._count),
            stop_token_ids=[],
        )


def prefill_seconds(engine: LLMEngine, prompts: PromptSource, tokens: int) -> float:
    """Return seconds from submission of a fresh prompt to its first token on the host."""
    request = prompts.request(tokens, 1)
    begin = time.perf_counter()
    engine.add(request)
    for event in _events(engine):
        if isinstance(event, TokensEvent):
            return time.perf_counter() - begin
    raise RuntimeError("the engine ended without a token")


def decode_milliseconds(
    engine: LLMEngine, prompts: PromptSource, batch: int, context: int
) -> list[float]:
    """Return the mean step time of each quarter of `DECODE_STEPS` steps with the whole batch decoding."""
    # The first sequences decode while the last are still prefilled, one token per step of that; they may not
    # end before the timing does.
    chunk = engine.scheduler.config.max_mixed_tokens - batch
    spare = 64 + batch * ceil_div(context, max(1, chunk))
    requests = [prompts.request(context, DECODE_STEPS + spare) for _ in range(batch)]
    for request in requests:
        engine.add(request)
    waiting = {r.request_id for r in requests}
    counts = dict.fromkeys(waiting, 0)
    marks: list[float] = []
    last = requests[-1].request_id
    for event in _events(engine):
        if not isinstance(event, TokensEvent):
            raise RuntimeError(f"a sequence ended inside the timed steps: {event}")
        counts[event.request_id] += len(event.token_ids)
        waiting.discard(event.request_id)
        if not waiting and event.request_id == last:
            marks.append(time.perf_counter())
            if len(marks) == DECODE_STEPS + 4:
                break
    for request in requests:
        engine.abort(request.request_id)
    drain(engine)
    quarter = DECODE_STEPS // 4
    # The first three marks settle the pipeline after the last prefill.
    timed = marks[3 : 3 + DECODE_STEPS + 1]
    return [
        (timed[i + quarter] - timed[i]) * 1e3 / quarter for i in range(0, DECODE_STEPS, quarter)
    ]


def drain(engine: LLMEngine) -> None:
    """Step until nothing runs."""
    while engine.has_work:
        engine.step()


def _events(engine: LLMEngine) -> Iterator[TokensEvent | FinishedEvent]:
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, ErrorEvent):
                raise RuntimeError(f"{event.code}: {event.message}")
            if isinstance(event, TokensEvent | FinishedEvent):
                yield event
