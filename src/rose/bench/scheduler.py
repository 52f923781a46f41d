"""What one decode step costs the host: schedule, inputs, collect, commit, encode and send events; no model runs.

What a GPU adds per step is one graph replay and one event wait; at a few milliseconds per step the rest of what stands
here is hidden behind the device where steps overlap. Beside the stages stand bare loops over as many sequences: what
plain Python needs for the least that a stage must do, and so what no rewriting in Python can save.
"""

from __future__ import annotations

import asyncio
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rose.bench.record import Origin, append, percentile
from rose.cache.layout import CacheLayout
from rose.cache.table import PageTable
from rose.config.cache import CacheConfig
from rose.config.scheduler import SchedulerConfig
from rose.decoders.results import ResultRing, Sampled
from rose.engine.engine import EngineLimits, LLMEngine
from rose.engine.scheduler import Scheduler
from rose.models.gpt_oss.config import published
from rose.protocol.channel import FrontendEndpoint, LocalPair
from rose.protocol.codec import encode_from_engine
from rose.protocol.event import TokensEvent
from rose.protocol.request import Request
from rose.runtime.inputs import DeviceTables
from rose.utils.device import CPU

PROMPT_TOKENS = 1000
CONTEXT_TOKENS = 131_072
VOCAB_SIZE = 201_088
SPARE_TOKENS = 1200
"""Beyond the steps that are timed, so that no sequence ends."""
BARE_ROUNDS = 300


class NullDecoder:
    """Sends every step to the (CPU) device tables and answers with a fixed token."""

    can_overlap = True
    model: Any = None

    def __init__(self, tables: DeviceTables, num_slots: int) -> None:
        self._tables = tables
        self._results = ResultRing(num_slots, tables.device)
        self.sampled = Sampled(torch.ones(num_slots, dtype=torch.int64), None)
        """What every step samples; may be set before a launch."""

    def launch(self, plan: Any) -> Any:
        """Do the host's share of a launch."""
        if plan.prefill:
            self._tables.mixed_inputs(plan, [])
        else:
            self._tables.send_decode(plan, len(plan.decode))
        return self._results.send(plan.step, plan.sample_slots, self.sampled, {})

    def collect(self, handle: Any) -> Any:
        """Return a token for everyone."""
        return self._results.receive(handle)


class Stages:
    """Times methods of objects by wrapping them."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Take the time of every call of `owner.name` as a sample of `stage`."""
        function, samples = getattr(owner, name), self.samples.setdefault(stage, [])

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments)
            samples.append((time.perf_counter() - begin) * 1e6)
            return result

        setattr(owner, name, timed)


def run_scheduler(
    *,
    sequences: int,
    steps: int,
    is_caching: bool,
    path: Path | None = None,
    commit: str | None = None,
) -> dict[str, Any]:
    """Time whole steps, then their stages, then bare loops; return the line, in microseconds.

    Units    sequences decode together, each with PROMPT_TOKENS and more of history
    """
    torch.set_num_threads(1)
    whole = _steps(sequences, steps, is_caching=is_caching, stages=None)
    stages = Stages()
    _steps(sequences, steps, is_caching=is_caching, stages=stages)
    origin = Origin.here(
        device=f"{cpu_name()}, Python {platform.python_version()}",
        config=f"null model, prefix cache {'on' if is_caching else 'off'}",
        commit=commit,
    )
    line = origin.line("scheduler", whole, batch=sequences, unit="us", p99=percentile(whole, 99))
    line["stages_us"] = {n: round(statistics.median(s), 1) for n, s in stages.samples.items()}
    line["bare_us"] = {n: round(t, 1) for n, t in _bare(sequences).items()}
    append(path, line)
    return line


def report(line: dict[str, Any]) -> str:
    """Return a line as text for people."""
    rows = [("whole step, median", line["median"]), ("  90th percentile", line["p90"])]
    rows += [(f"  {name}", value) for name, value in line["stages_us"].items()]
    rows += [(f"bare: {name}", value) for name, value in line["bare_us"].items()]
    table = [f"{name:40} {value:8.1f} us" for name, value in rows]
    return "\n".join([f"{line['batch']} sequences on {line['device']}", *table])


def build_null(num_sequences: int, num_tokens: int, *, is_caching: bool) -> LLMEngine:
    """Return an engine without a model, overlapped, with pages for so many tokens of each sequence."""
    config = SchedulerConfig(max_sequences=num_sequences, max_waiting=num_sequences)
    layout = CacheLayout.of(published("20b"), CacheConfig(), kv_element="bf16")
    pages = {"full": num_sequences * (num_tokens // 64 + 1), "window": 48 * num_sequences}
    tables = DeviceTables(
        layout,
        num_slots=num_sequences,
        context_tokens=CONTEXT_TOKENS,
        max_step_tokens=config.step_tokens,
        vocab_size=VOCAB_SIZE,
        device=CPU,
    )
    limits = EngineLimits(model="null", context_tokens=CONTEXT_TOKENS, vocab_size=VOCAB_SIZE)
    decoder: Any = NullDecoder(tables, num_sequences)
    table = PageTable(layout, pages, is_caching=is_caching)
    return LLMEngine(Scheduler(config, table), decoder, limits, is_overlapped=True)


def _fill(
    engine: LLMEngine, pair: LocalPair, num_sequences: int, num_tokens: int
) -> FrontendEndpoint:
    """Take requests from a frontend, to which their events will go, and run all prompts; return the frontend."""

    async def send() -> FrontendEndpoint:
        frontend = pair.frontend()
        for i in range(num_sequences):
            # Prompts of different lengths: pages run out at different steps, as in life.
            prompt = [1] * (PROMPT_TOKENS + i % 64)
            await frontend.send(
                Request(request_id=f"request-{i}", prompt_token_ids=prompt, max_tokens=num_tokens)
            )
        return frontend

    frontend = asyncio.run(send())
    while (message := pair.engine.receive(1000)) is not None:
        assert isinstance(message, Request)
        refusal = engine.add(message)
        assert not refusal, refusal
        if len(engine.running_ids()) == num_sequences:
            break
    while engine.scheduler.waiting or any(
        s.num_scheduled < s.prefill_end for s in engine.scheduler.running
    ):
        engine.step()
    return frontend


def _steps(
    num_sequences: int, num_steps: int, *, is_caching: bool, stages: Stages | None
) -> list[float]:
    """Run an engine as its service does and return the time of each step in microseconds."""
    engine = build_null(num_sequences, num_steps + SPARE_TOKENS, is_caching=is_caching)
    pair = LocalPair()
    endpoint = pair.engine
    frontend = _fill(engine, pair, num_sequences, num_steps + 100)
    if stages is not None:
        stages.wrap(engine.scheduler, "schedule", "schedule")
        stages.wrap(engine.decoder, "launch", "inputs")
        stages.wrap(engine.decoder, "collect", "collect")
        stages.wrap(engine, "_commit", "commit")
        stages.wrap(endpoint, "send", "encode and send")
    samples = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        endpoint.receive()
        is_sent = endpoint.send(engine.expire() + engine.step())
        assert is_sent, "events went to nobody"
        samples.append((time.perf_counter() - begin) * 1e6)
    assert len(engine.running_ids()) == num_sequences, "a sequence ended while it was timed"
    frontend.drop()
    pair.close()
    return samples


class _Row:
    __slots__ = ("length", "pending", "position", "tokens")

    def __init__(self) -> None:
        self.length = self.position = self.pending = 0
        self.tokens: list[int] = []


def _bare(count: int) -> dict[str, float]:
    """Time the least that each stage does per sequence, written as plainly as Python allows."""
    rows = [_Row() for _ in range(count)]
    names = [f"request-{i}" for i in range(count)]
    events: list[Any] = [TokensEvent(request_id=name, token_ids=[1]) for name in names]

    def plan() -> None:
        for row in rows:
            row.position = row.length
            row.length += 1
            row.pending += 1

    def commit() -> None:
        for row in rows:
            row.pending -= 1
            row.tokens.append(1)

    def make() -> None:
        for name in names:
            TokensEvent(request_id=name, token_ids=[1])

    return {
        "three numbers per sequence (schedule)": _median_us(plan),
        "a number and a token per sequence (commit)": _median_us(commit),
        "one event per sequence (commit)": _median_us(make),
        "msgpack of the events (encode)": _median_us(lambda: encode_from_engine(events)),
    }


def _median_us(function: Callable[[], object]) -> float:
    samples = []
    for _ in range(BARE_ROUNDS):
        begin = time.perf_counter()
        function()
        samples.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(samples)


def cpu_name() -> str:
    """Return what the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown CPU"
    names = (x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    return next(names, "unknown CPU")
