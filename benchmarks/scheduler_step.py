"""CPU cost of one decode step without a model: schedule, send, collect, commit, encode, send events.

What a GPU engine adds per step is one graph replay and one event wait. Run it as
    PYTHONPATH=src python benchmarks/scheduler_step.py [--sequences 128] [--steps 2000] [--no-cache]
and it prints one JSON line with medians in microseconds per stage and for the whole step.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from rose.cache.layout import CacheLayout
from rose.cache.table import PageTable
from rose.config.cache import CacheConfig
from rose.config.scheduler import SchedulerConfig
from rose.decoders.results import ResultRing, Sampled
from rose.engine.engine import EngineLimits, LLMEngine
from rose.engine.scheduler import Scheduler
from rose.models.gpt_oss.config import published
from rose.protocol.channel import LocalPair
from rose.protocol.request import Request
from rose.runtime.inputs import DeviceTables
from rose.utils.device import CPU


class NullDecoder:
    """Sends every step to the (CPU) device tables and answers with a fixed token."""

    can_overlap = True
    model = None

    def __init__(self, tables: DeviceTables, num_slots: int) -> None:
        self._tables = tables
        self._results = ResultRing(num_slots, tables.device)
        self._sampled = Sampled(torch.ones(num_slots, dtype=torch.int64), None)

    def launch(self, plan):
        if plan.prefill:
            self._tables.mixed_inputs(plan, [])
        else:
            self._tables.send_decode(plan, len(plan.decode))
        return self._results.send(plan.step, plan.sample_slots, self._sampled, {})

    def collect(self, handle):
        return self._results.receive(handle)


def build(num_sequences: int, num_tokens: int, *, is_caching: bool) -> LLMEngine:
    config = SchedulerConfig(max_sequences=num_sequences)
    layout = CacheLayout.of(published("20b"), CacheConfig(), kv_format="bf16")
    pages = {"full": num_sequences * (num_tokens // 64 + 1), "window": 6000}
    table = PageTable(layout, pages, is_caching=is_caching)
    tables = DeviceTables(
        layout,
        num_slots=num_sequences,
        context_tokens=131072,
        max_step_tokens=config.step_tokens,
        vocab_size=201088,
        device=CPU,
    )
    limits = EngineLimits(model="null", context_tokens=131072, vocab_size=201088)
    decoder = NullDecoder(tables, num_sequences)
    return LLMEngine(Scheduler(config, table), decoder, limits, is_overlapped=True)


class Stages:
    """Times named functions of an object by wrapping them."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}

    def wrap(self, owner, name: str, stage: str) -> None:
        function, samples = getattr(owner, name), self.samples.setdefault(stage, [])

        def timed(*arguments):
            begin = time.perf_counter()
            result = function(*arguments)
            samples.append((time.perf_counter() - begin) * 1e6)
            return result

        setattr(owner, name, timed)


def fill(engine: LLMEngine, num_sequences: int, prompt_tokens: int, num_tokens: int) -> None:
    for i in range(num_sequences):
        # Prompts of different lengths: pages run out at different steps, as in life.
        prompt = [1] * (prompt_tokens + i % 64)
        engine.add(
            Request(request_id=f"request-{i}", prompt_token_ids=prompt, max_tokens=num_tokens)
        )
    while engine.scheduler.waiting or any(
        s.num_scheduled < s.prefill_end for s in engine.scheduler.running
    ):
        engine.step()


def measure(
    num_sequences: int, num_steps: int, *, by_stage: bool, is_caching: bool
) -> dict[str, float]:
    engine = build(num_sequences, num_steps + 1200, is_caching=is_caching)
    fill(engine, num_sequences, 1000, num_steps + 100)
    endpoint = LocalPair().engine
    stages = Stages()
    if by_stage:
        stages.wrap(engine.scheduler, "schedule", "schedule")
        stages.wrap(engine.decoder, "launch", "inputs")
        stages.wrap(engine.decoder, "collect", "collect")
        stages.wrap(engine, "_commit", "commit")
        stages.wrap(endpoint, "send", "encode and send")
    total = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        endpoint.receive()
        endpoint.send(engine.step())
        total.append((time.perf_counter() - begin) * 1e6)
    medians = {name: statistics.median(s) for name, s in stages.samples.items()}
    return medians | {
        "step": statistics.median(total),
        "step_p99": sorted(total)[len(total) * 99 // 100],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--no-cache", dest="cache", action="store_false", help="no prefix cache")
    options = parser.parse_args()
    torch.set_num_threads(1)
    whole = measure(options.sequences, options.steps, by_stage=False, is_caching=options.cache)
    stages = measure(options.sequences, options.steps, by_stage=True, is_caching=options.cache)
    line = {
        "sequences": options.sequences,
        "cache": options.cache,
        "cpu": cpu_name(),
        "python": platform.python_version(),
    }
    line |= {f"{k}_us": round(v, 1) for k, v in (stages | whole).items()}
    print(json.dumps(line))


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
