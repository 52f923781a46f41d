"""Which Triton kernels a server on an H200 compiles at its start, and which only while it serves; needs no GPU.

    python benchmarks/late_kernels.py --json late.jsonl

The engine runs on tensors without a device (tests/fakes/launches.py). One JSON line: kernels of the start and the CPU
seconds that this machine takes to compile them for sm_90a; kernels that a closed loop of 1024/1024 meets later, by
step, behind the cells that came before it on the GPU; kernels that random steps need then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from rose.utils.extras import missing_package

try:
    from fakes import launches
    from rose.bench.growth import run_steps
    from rose.bench.load import Clients, mixed
    from rose.bench.record import Origin, append
    from rose.bench.sweep import PromptSource, drain, prefill_many_seconds
    from rose.config.cache import CacheConfig
    from rose.engine.engine import LLMEngine
except ModuleNotFoundError as error:
    lacking = missing_package("benchmarks/late_kernels.py", error)
    if lacking is None:
        raise
    sys.exit(f"error: {lacking}")

TOKENS = 1024
STEPS = {32: 780, 128: 186}
"""In flight -> steps, as many as the lines of h200-20261201.jsonl have."""


def main() -> None:
    """Count, compile, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="random steps")
    parser.add_argument("--json", type=Path, help="append the line to this file")
    parser.add_argument("--commit")
    options = parser.parse_args()
    jobs: dict[tuple[str, str], Any] = {}
    with launches.recording() as found:
        with _keeping(found, jobs):
            engine = launches.engine(cache=CacheConfig(kv_tokens=1 << 21))
        begin, at_start = time.perf_counter(), set(found)
        seconds = _compile_seconds(jobs)
        loop = list(_cells(engine, found))
        in_loop = set(found)
        context = engine.limits.context_tokens
        for plan in launches.serving_steps(256, context, count=options.steps):
            if plan.num_tokens <= engine.scheduler.config.step_tokens:
                engine.decoder.collect(engine.decoder.launch(plan))
    print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr)
    origin = Origin.here(
        device="none (keys of an H200)",
        config="weights=mxfp4 activations=bf16 kv=bf16",
        commit=options.commit,
        command=shlex.join(["python", *sys.argv]),
    )
    line = origin.stamp(
        {
            "bench": "late_kernels",
            "model": "20b, two layers",
            "at_start": len(at_start),
            "by_kernel": dict(Counter(name for name, _ in at_start)),
            "compile_cpu_s": round(seconds, 2),
            "in_loops": loop,
            "random_steps": options.steps,
            "in_random_steps": len(set(found) - in_loop),
        }
    )
    print(json.dumps(line))
    append(options.json, line)


def _keeping(found: launches.Keys, jobs: dict[tuple[str, str], Any]) -> Any:
    """Keep the arguments of each first launch."""
    from triton.runtime import jit

    record = jit.JITFunction.run

    def run(function: Any, *args: Any, **kwargs: Any) -> None:
        before = len(found)
        record(function, *args, **kwargs)
        if len(found) > before:
            [key] = found - set(jobs)
            jobs[key] = (function, args, kwargs)

    return mock.patch.object(jit.JITFunction, "run", run)


def _compile_seconds(jobs: dict[tuple[str, str], Any]) -> float:
    """Return the CPU seconds of all compilations, those of ptxas included."""
    from triton import knobs

    def spent() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system

    begin = spent()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(knobs.cache, "dir", folder),
        mock.patch.object(knobs.runtime, "jit_post_compile_hook", None),  # nothing serves here
    ):
        for function, args, kwargs in jobs.values():
            launches.compile_only(function, *args, **kwargs)
    return spent() - begin


def _cells(engine: LLMEngine, found: launches.Keys) -> Iterator[dict[str, Any]]:
    prompts = PromptSource(engine.limits.vocab_size)
    steps: list[dict[str, int]] = []
    launch = engine.decoder.launch

    def counted(plan: Any) -> Any:
        before = set(found)
        handle = launch(plan)
        steps.append(dict(Counter(name for name, _ in found - before)))
        return handle

    engine.decoder.launch = counted
    cells = {
        "prefill 128 x 8192": lambda: prefill_many_seconds(engine, prompts, 8192, 128),
        "mixed 32 x 1024, 32768": lambda: mixed(
            engine, prompts, batch=32, context=1024, prompt_tokens=32768
        ),
        "growth": lambda: run_steps(engine, prompts, 1100, 32, 1024, 128),
        **{f"load, {n} in flight": lambda n=n: _load(engine, prompts, n) for n in STEPS},
    }
    for name, run in cells.items():
        steps.clear()
        run()
        drain(engine)
        late = {str(i): step for i, step in enumerate(steps) if step}
        yield {"cell": name, "steps": len(steps), "late_by_step": late}
    engine.decoder.launch = launch


def _load(engine: LLMEngine, prompts: PromptSource, in_flight: int) -> None:
    """As `rose bench load` has it, for a number of steps in place of seconds."""
    clients, lengths = Clients(engine, prompts), random.Random(in_flight)
    for _ in range(in_flight):
        clients.add(TOKENS, lengths.randint(1, TOKENS), is_filled=True)
    for _ in range(STEPS[in_flight]):
        for _ in clients.step():
            clients.add(TOKENS, TOKENS)
    for request_id in engine.running_ids():
        engine.abort(request_id)


if __name__ == "__main__":
    main()
