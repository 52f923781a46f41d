"""Latency of prefill and decode, measured through the public engine: token ids on the host at both ends.

Prefill: from `add` of a prompt never seen before to its first token. Decode, with the prefix cache on: all prompts
are in the cache, and (t(97 tokens) - t(1 token)) / 96 is a step, where t is from the first `add` to the last token of
the last sequence; the definition of the engine that rose is compared with. Without the cache: the batch is prefilled
for real, then 96 steps are timed from the moment every sequence has its first token. Each step gives one token to
every sequence, sampled at temperature 1 so that the sequences differ.

A sweep over long contexts would prefill for minutes to decode for seconds: `fill_cache` puts prompts into the cache
without computing them, on pages of random numbers. Kernels take the same time over them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from rose.bench.fit import CellError
from rose.cache.keys import PageKeys
from rose.engine.engine import LLMEngine
from rose.protocol.event import ErrorEvent, FinishedEvent, FromEngine, TokensEvent
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams
from rose.utils.math import ceil_div

DECODE_STEPS = 96
CACHED_REPEATS = 4
"""Differences taken of each cell that is timed with its prompts in the cache."""
SETTLING_STEPS = 4
"""Steps after the last prefill that are not timed: the pipeline settles."""


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
    drain(engine)
    request = prompts.request(tokens, 1)
    begin = time.perf_counter()
    submit(engine, request)
    for event in _events(engine):
        if isinstance(event, TokensEvent):
            return time.perf_counter() - begin
    raise RuntimeError("the engine ended without a token")


def prefill_many_seconds(
    engine: LLMEngine, prompts: PromptSource, tokens: int, num_prompts: int
) -> float:
    """Return seconds from submission of many fresh prompts to the first token of the last."""
    requests = [prompts.request(tokens, 1) for _ in range(num_prompts)]
    waiting = {r.request_id for r in requests}
    begin = time.perf_counter()
    for request in requests:
        submit(engine, request)
    for event in _events(engine):
        if isinstance(event, TokensEvent):
            waiting.discard(event.request_id)
            if not waiting:
                return time.perf_counter() - begin
    raise RuntimeError("the engine ended without a token of each prompt")


def decode_tokens(engine: LLMEngine, batch: int, context: int) -> int:
    """Return the length that the sequences of a decode cell must be able to reach.

    The first decode while the last are still prefilled, at most `max_mixed_tokens` in a step; none may end
    before the timing does.
    """
    chunk = max(1, engine.scheduler.config.mixed_tokens - batch)
    steps = batch * (ceil_div(context, chunk) + 1)
    return context + steps + DECODE_STEPS + 2 * SETTLING_STEPS


def randomise_kv(engine: LLMEngine) -> None:
    """Write random numbers into all KV pages, so that `fill_cache` has something to point at.

    HAZARD: what sequences and the prefix cache hold is lost; nothing may run.
    """
    decoder: Any = engine.decoder
    with torch.inference_mode():
        for pages in decoder.runner.kv_pages:
            for part in pages.split(512):
                part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=part.device))


def fill_cache(engine: LLMEngine, requests: list[Request]) -> None:
    """Put the prompts into the prefix cache as if they had been computed in chunks and had ended.

    Raises  CellError where the KV cache is too small for one of them
    """
    table, chunk = engine.table, engine.scheduler.config.step_tokens
    for request in requests:
        tokens = request.prompt_token_ids
        keys, pages = PageKeys(request.cache_salt), table.open(num_tokens=len(tokens))
        for end in (*range(chunk, len(tokens), chunk), len(tokens)):
            if table.grow(pages, end) is None:
                table.close(pages)
                raise CellError(f"the KV cache has no room for a prompt of {len(tokens)} tokens")
            table.register(pages, keys, tokens, end)
            table.free_behind(pages, end)
        table.close(pages)


def cached_decode_milliseconds(
    engine: LLMEngine,
    prompts: PromptSource,
    batch: int,
    context: int,
    *,
    repeats: int = CACHED_REPEATS,
    is_filled: bool = False,
) -> list[float]:
    """Return (t(97 tokens) - t(1 token)) / 96 some times over, with all prompts in the prefix cache.

    Units   is_filled: by `fill_cache`; otherwise they are computed first
    Raises  CellError where a prompt was not found in the cache, or a sequence was preempted
    """
    drain(engine)
    requests = [prompts.request(context, 1) for _ in range(batch)]
    page_tokens = engine.table.layout.page_tokens
    cached = (context - 1) // page_tokens * page_tokens
    preemptions = engine.scheduler.num_preemptions
    if is_filled:
        fill_cache(engine, requests)
    # The first time computes the prompts, or, where KV is made up, does what else is done once: without it the first
    # difference was up to a third too small.
    _generation_seconds(engine, requests, 1, least_cached=cached if is_filled else 0)
    samples = []
    for _ in range(repeats):
        short = _generation_seconds(engine, requests, 1, least_cached=cached)
        long = _generation_seconds(engine, requests, DECODE_STEPS + 1, least_cached=cached)
        samples.append((long - short) * 1e3 / DECODE_STEPS)
    if engine.scheduler.num_preemptions != preemptions:
        raise CellError(
            f"a sequence of {batch} x {context} was preempted; the KV cache is too small"
        )
    return samples


def _generation_seconds(
    engine: LLMEngine, requests: list[Request], max_tokens: int, *, least_cached: int
) -> float:
    """Return seconds from the first `add` to the last token of the last request."""
    requests = [msgspec.structs.replace(r, max_tokens=max_tokens) for r in requests]
    found = dict.fromkeys((r.request_id for r in requests), 0)
    num_open = len(requests)
    begin = end = time.perf_counter()
    for request in requests:
        submit(engine, request)
    for event in _events(engine):
        if isinstance(event, TokensEvent):
            found[event.request_id] += event.num_cached_tokens
            continue
        num_open -= 1
        if not num_open:
            end = time.perf_counter()
    if num_open:
        raise RuntimeError(f"{num_open} of {len(requests)} requests did not end")
    if min(found.values()) < least_cached:
        raise CellError(
            f"a prompt of {len(requests[0].prompt_token_ids)} tokens found {min(found.values())} of them in the "
            f"prefix cache, {least_cached} were to be there; it is off (cache.prefix_cache) or too small"
        )
    return end - begin


def decode_milliseconds(
    engine: LLMEngine,
    prompts: PromptSource,
    batch: int,
    context: int,
    *,
    steps: int = DECODE_STEPS,
    trace: AbstractContextManager[None] | None = None,
) -> list[float]:
    """Return the mean step time of each quarter of `steps` steps with the whole batch decoding.

    `trace` is entered for the timed steps alone.
    """
    drain(engine)
    max_tokens = decode_tokens(engine, batch, context) - context
    requests = [prompts.request(context, max_tokens) for _ in range(batch)]
    preemptions = engine.scheduler.num_preemptions
    for request in requests:
        submit(engine, request)
    events = _events(engine)
    _until_all_decode(events, [r.request_id for r in requests])
    last = requests[-1].request_id
    _marks(events, last, SETTLING_STEPS)
    with trace or nullcontext():
        marks = _marks(events, last, steps + 1)
    if engine.scheduler.num_preemptions != preemptions:
        raise CellError(
            f"a sequence of {batch} x {context} was preempted; the KV cache is too small"
        )
    for request in requests:
        engine.abort(request.request_id)
    drain(engine)
    quarter = steps // 4
    return [(marks[i + quarter] - marks[i]) * 1e3 / quarter for i in range(0, steps, quarter)]


def _until_all_decode(events: Iterator[TokensEvent | FinishedEvent], ids: list[str]) -> None:
    waiting = set(ids)
    for event in events:
        _require_tokens(event)
        waiting.discard(event.request_id)
        if not waiting:
            return


def _marks(
    events: Iterator[TokensEvent | FinishedEvent], request_id: str, count: int
) -> list[float]:
    """Return the times of the next `count` tokens of one request, the last of its step."""
    marks: list[float] = []
    for event in events:
        _require_tokens(event)
        if event.request_id == request_id:
            marks.append(time.perf_counter())
            if len(marks) == count:
                return marks
    raise RuntimeError("the engine ended inside the timed steps")


def _require_tokens(event: TokensEvent | FinishedEvent) -> None:
    if not isinstance(event, TokensEvent):
        raise RuntimeError(f"a sequence ended inside the timed steps: {event}")


def submit(engine: LLMEngine, request: Request) -> None:
    """Give a request to the engine.

    Raises  CellError where it takes none
    """
    require_no_error(engine.add(request))


def require_no_error(events: Iterable[FromEngine]) -> None:
    """Raise CellError where a request was refused or failed."""
    for event in events:
        if isinstance(event, ErrorEvent):
            raise CellError(f"{event.code}: {event.message}")


def drain(engine: LLMEngine) -> None:
    """Step until nothing runs."""
    while engine.has_work:
        engine.step()


def _events(engine: LLMEngine) -> Iterator[TokensEvent | FinishedEvent]:
    while engine.has_work:
        events = engine.step()
        require_no_error(events)
        for event in events:
            if isinstance(event, TokensEvent | FinishedEvent):
                yield event
