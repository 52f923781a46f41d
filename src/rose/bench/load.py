"""The engine under load: a closed loop of requests, and decoding beside one long prompt.

Closed loop: so many requests are always in flight; one that ends is replaced at once. The first ones have
random output lengths, so that ends, and with them prefills, are spread as in a server that has run for long.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rose.bench.fit import CellError
from rose.bench.sweep import PromptSource, drain, fill_cache, require_no_error, submit
from rose.engine.engine import LLMEngine
from rose.protocol.event import FinishedEvent, TokensEvent
from rose.protocol.request import Request


@dataclass(slots=True, kw_only=True)
class Timeline:
    """When one request was given to the engine and when its tokens came."""

    begin: float
    tokens: list[float] = field(default_factory=list)

    @property
    def first_token_ms(self) -> float:
        """Time to the first token."""
        return (self.tokens[0] - self.begin) * 1e3

    @property
    def token_ms(self) -> float:
        """Mean time per token after the first."""
        return (self.tokens[-1] - self.tokens[0]) * 1e3 / (len(self.tokens) - 1)

    def between(self, begin: float, end: float) -> Timeline:
        """Return the part of it that was seen in a time."""
        return Timeline(begin=self.begin, tokens=[t for t in self.tokens if begin < t <= end])


LEAST_SEEN = 16
"""Tokens within the measured time, or all of a request that has fewer, from which one that was not wholly in it has
a time per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What the requests of the measured time saw."""

    output_tokens_per_s: float
    seconds: float
    num_requests: int
    """Whose times per token these are."""
    first_token_ms: list[float]
    token_ms: list[float]
    step_ms: list[float]
    """From one step's tokens to the next one's."""


class Clients:
    """Feeds an engine and keeps the timeline of every request."""

    def __init__(self, engine: LLMEngine, prompts: PromptSource) -> None:
        self.engine, self.prompts = engine, prompts
        self.timelines: dict[str, Timeline] = {}

    def add(self, input_tokens: int, output_tokens: int, *, is_filled: bool = False) -> str:
        """Submit a fresh prompt; `is_filled`: after it was put into the prefix cache."""
        request: Request = self.prompts.request(input_tokens, output_tokens)
        if is_filled:
            fill_cache(self.engine, [request])
        self.timelines[request.request_id] = Timeline(begin=time.perf_counter())
        submit(self.engine, request)
        return request.request_id

    def step(self) -> list[str]:
        """Run one step, note its tokens, and return the ids of requests that ended."""
        events = self.engine.step()
        now = time.perf_counter()
        require_no_error(events)
        for event in events:
            if isinstance(event, TokensEvent):
                self.timelines[event.request_id].tokens += [now] * len(event.token_ids)
        return [e.request_id for e in events if isinstance(e, FinishedEvent)]


def closed_loop(
    engine: LLMEngine,
    prompts: PromptSource,
    *,
    in_flight: int,
    input_tokens: int,
    output_tokens: int,
    requests: int,
    seconds: float | None = None,
    is_filled: bool = False,
    now: Callable[[str], None] = lambda _text: None,
) -> LoadResult:
    """Keep `in_flight` requests running until so many whole ones have ended since all were decoding.

    Units    output_tokens >= 2; whole: with all their output tokens and wholly inside the measured time;
             seconds: end after so long even so, and time what was seen of each request; is_filled: the prompts of
             the requests that are there at the beginning are not computed (`fill_cache`), those of later ones are
    Raises   CellError where a request was refused, or the seconds were too few to time any
    """
    clients = Clients(engine, prompts)
    lengths = random.Random(in_flight)
    for _ in range(in_flight):
        clients.add(input_tokens, lengths.randint(1, output_tokens), is_filled=is_filled)
    begin: float | None = None
    whole: list[Timeline] = []
    step_ends: list[float] = []
    first = set(clients.timelines)
    while len(whole) < requests:
        if begin is not None and seconds is not None and time.perf_counter() - begin > seconds:
            break
        ended = clients.step()
        if begin is None and all(clients.timelines[i].tokens for i in first):
            begin = time.perf_counter()
        if begin is not None:
            step_ends.append(time.perf_counter())
        for request_id in ended:
            timeline = clients.timelines[request_id]
            if begin is not None and timeline.begin >= begin:
                whole.append(timeline)
                now(f"{in_flight} in flight: {len(whole)} of {requests} requests")
            clients.add(input_tokens, output_tokens)
    end = time.perf_counter()
    assert begin is not None, "requests ended before they began"
    tokens = sum(begin < t <= end for line in clients.timelines.values() for t in line.tokens)
    for request_id in engine.running_ids():
        engine.abort(request_id)
    drain(engine)
    timed, least = whole, min(LEAST_SEEN, output_tokens)
    if seconds is not None:
        timed = [line.between(begin, end) for line in clients.timelines.values()]
        timed = [line for line in timed if len(line.tokens) >= least]
    begun = [t for t in clients.timelines.values() if t.begin >= begin and t.tokens]
    first_tokens = [t.first_token_ms for t in (whole if seconds is None else begun)]
    if not timed or not first_tokens:
        missing = "began and had a first token" if timed else f"had {least} tokens"
        raise CellError(
            f"no request of {in_flight} in flight {missing} within {end - begin:.3g} s; give it more --seconds"
        )
    return LoadResult(
        output_tokens_per_s=tokens / (end - begin),
        seconds=end - begin,
        num_requests=len(timed),
        first_token_ms=first_tokens,
        token_ms=[t.token_ms for t in timed],
        step_ms=[(b - a) * 1e3 for a, b in itertools.pairwise(step_ends)],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedResult:
    """Gaps between the tokens of decoding sequences while a prompt entered, and before."""

    gaps_ms: list[float]
    quiet_ms: float
    """Median gap before the prompt came."""
    prompt_ms: float
    """From submission of the prompt to its first token."""


def mixed(
    engine: LLMEngine,
    prompts: PromptSource,
    *,
    batch: int,
    context: int,
    prompt_tokens: int,
    quiet_steps: int = 32,
) -> MixedResult:
    """Let `batch` sequences decode, give the engine one long prompt, and collect all their token gaps."""
    clients, preemptions = Clients(engine, prompts), engine.scheduler.num_preemptions
    output = mixed_tokens(engine, batch, context, prompt_tokens) - context
    decoding = [clients.add(context, output) for _ in range(batch)]
    lines = [clients.timelines[i] for i in decoding]
    while not all(line.tokens for line in lines):
        clients.step()
    quiet = min(len(line.tokens) for line in lines) + quiet_steps
    while min(len(line.tokens) for line in lines) < quiet:
        clients.step()
    quiet_gaps = [gap for line in lines for gap in _gaps(line.tokens[-quiet_steps:])]
    before = [len(line.tokens) - 1 for line in lines]
    prompt = clients.timelines[clients.add(prompt_tokens, 2)]
    while not prompt.tokens:
        ended = clients.step()
        assert not set(ended) & set(decoding), "a decoding sequence ended before the prompt was in"
    if engine.scheduler.num_preemptions != preemptions:
        raise CellError("a sequence was preempted; the KV cache is too small; raise --kv-tokens")
    result = MixedResult(
        # The token before the prompt opens the first gap, which is the one that waits for its first chunk.
        gaps_ms=[g for line, n in zip(lines, before, strict=True) for g in _gaps(line.tokens[n:])],
        quiet_ms=statistics.median(quiet_gaps),
        prompt_ms=prompt.first_token_ms,
    )
    for request_id in engine.running_ids():
        engine.abort(request_id)
    drain(engine)
    return result


def mixed_tokens(engine: LLMEngine, batch: int, context: int, prompt_tokens: int) -> int:
    """Return the length that the decoding sequences must be able to reach."""
    chunk = max(1, engine.scheduler.config.mixed_tokens - batch)
    return context + 128 + batch * (context // chunk + 1) + prompt_tokens // chunk


def _gaps(times: list[float]) -> list[float]:
    return [(b - a) * 1e3 for a, b in itertools.pairwise(times)]
