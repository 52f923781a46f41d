"""Where the time of a prefill goes between submission and token: host, inputs, model, tail; and per kernel, warm.

    PYTHONPATH=src python benchmarks/prefill_timeline.py --size 20b [--tokens 8192] [--only OP=NAME ...] [--json FILE]

Prompts follow one another without a pause, as under load: a GPU that rested for seconds runs its first 35 ms at a
higher clock than its power limit allows later, and so does a run under a profiler that starts slowly. One JSON line
per length, milliseconds, medians:

    host     from `add` to the launch of the step, on the host
    prepare  from there to the first operator of the model, on the host
    inputs   the same on the device, to the first kernel of the model
    model    all layers, the head and the token, on the device; of it `busy` in kernels (profiled, last prompt)
    tail     from the end on the device to the token in Python
    launch   how long the host took to enqueue the step; hidden behind the device unless it is longer than `model`

Where nvidia-smi is found, clock and power during the samples stand beside them. A CPU gives what the host does alone.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from rose.bench.build import build, setup
from rose.bench.record import Origin
from rose.bench.sweep import PromptSource, drain
from rose.engine.engine import LLMEngine
from rose.protocol.event import TokensEvent

WORDS = {
    r"product<.*Plan<true": "gate_up",
    r"product<.*Plan<false": "down",
    "nvjet|gemm|cutlass": "projections",
    "attention_prefill_window": "attention, window",
    "attention_prefill": "attention, full",
    "combine": "combine",
    "quantize": "quantise rows",
    "sort": "sort",
    "gather": "embedding",
    "Mem(set|cpy)": "memset, copies",
    r"^_\w*kernel": "Triton (norms, rope, router, head)",
}
"""First pattern that a kernel's name matches -> its name in the output."""


class Marks:
    """Times of one step on the host, and events on the device."""

    def __init__(self, engine: LLMEngine) -> None:
        self.is_cuda = torch.cuda.is_available() and engine.model.device.type == "cuda"
        self.launch_s = self.forward_s = self.launched_s = 0.0
        self.events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(3)] if self.is_cuda else []
        )
        decoder: Any = engine.decoder
        launch, forward = decoder.launch, decoder.model.forward

        def marked_launch(plan: Any) -> Any:
            self.launch_s = time.perf_counter()
            self._record(0)
            handle = launch(plan)
            self._record(2)
            self.launched_s = time.perf_counter()
            return handle

        def marked_forward(*args: Any) -> Any:
            self.forward_s = time.perf_counter()
            self._record(1)
            return forward(*args)

        decoder.launch, decoder.model.forward = marked_launch, marked_forward

    def _record(self, which: int) -> None:
        if self.is_cuda:
            self.events[which].record()


def prefill(
    engine: LLMEngine, prompts: PromptSource, tokens: int, marks: Marks
) -> dict[str, float]:
    """Run one prompt of a single step; return its parts in milliseconds."""
    request = prompts.request(tokens, 1)
    begin = time.perf_counter()
    engine.add(request)
    end = 0.0
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokensEvent):
                end = time.perf_counter()
    parts = {
        "whole": end - begin,
        "host": marks.launch_s - begin,
        "prepare": marks.forward_s - marks.launch_s,
        "launch": marks.launched_s - marks.launch_s,
    }
    parts = {name: 1e3 * seconds for name, seconds in parts.items()}
    if marks.is_cuda:
        first, model, last = marks.events
        parts["inputs"], parts["model"] = first.elapsed_time(model), model.elapsed_time(last)
        parts["tail"] = parts["whole"] - parts["host"] - parts["inputs"] - parts["model"]
    else:
        parts["tail"] = parts["whole"] - parts["host"] - parts["launch"]
    return parts


def kernels(
    engine: LLMEngine, prompts: PromptSource, tokens: int, marks: Marks, count: int
) -> dict:
    """Profile `count` prompts without a pause; return the milliseconds of each kind of kernel in the last of them."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(count):
            prefill(engine, prompts, tokens, marks)
        torch.cuda.synchronize()
    events: Any = profiler.events()
    found = [e for e in events if e.device_type.name == "CUDA"]
    found.sort(key=lambda e: e.time_range.start)
    last = found[len(found) * (count - 1) // count :]
    times: dict[str, float] = defaultdict(float)
    for event in last:
        word = next((w for p, w in WORDS.items() if re.search(p, event.name)), "other")
        times[word] += event.time_range.elapsed_us() / 1e3
    end = max(e.time_range.end for e in last)
    span = (end - min(e.time_range.start for e in last)) / 1e3
    times = {word: round(t, 3) for word, t in sorted(times.items(), key=lambda p: -p[1])}
    return {
        "busy": round(sum(times.values()), 3),
        "span": round(span, 3),
        "calls": len(last),
        **times,
    }


def watch_clock() -> subprocess.Popen[str] | None:
    """Start to sample clock and power every 20 ms."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = "--query-gpu=clocks.sm,power.draw.instant"
    return subprocess.Popen(
        ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "20"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def clock(watch: subprocess.Popen[str] | None) -> dict[str, float]:
    """Stop it; return medians of the samples under load."""
    if watch is None:
        return {}
    watch.terminate()
    assert watch.stdout is not None
    rows = [line.split(",") for line in watch.stdout.read().splitlines()]
    found = [(float(r[0]), float(r[1])) for r in rows if len(r) == 2 and "N/A" not in r[1]]
    busy = [(mhz, watt) for mhz, watt in found if watt > 300] or found
    if not busy:
        return {}
    return {
        "clock_mhz": statistics.median(m for m, _ in busy),
        "power_w": statistics.median(w for _, w in busy),
    }


def main() -> None:
    """Build once, measure each length, print."""
    parser = argparse.ArgumentParser(description="Where the time of a prefill goes.")
    parser.add_argument("--size", default="20b", choices=("20b", "120b", "tiny"))
    parser.add_argument("--tokens", default="8192", help="lengths, each of one step")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", action="append", default=[], metavar="OP=NAME")
    parser.add_argument("--max-step-tokens", type=int, default=16384)
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    only = dict(pair.split("=", 1) for pair in options.only)
    bench = setup(
        size=options.size, weights="mxfp4", device=options.device, only=only, layers=options.layers,
        max_step_tokens=options.max_step_tokens, graphs=False,
    )  # fmt: skip
    engine = build(bench, lambda text: print(text, flush=True))
    origin = Origin.here(
        device=bench.device.name, config=bench.name, commit=options.commit,
        command=shlex.join(["python", "benchmarks/prefill_timeline.py", *sys.argv[1:]]),
    )  # fmt: skip
    prompts, marks = PromptSource(bench.model_config.vocab_size), Marks(engine)
    for tokens in (int(t) for t in options.tokens.split(",")):
        assert tokens <= options.max_step_tokens, f"{tokens} tokens take more than one step"
        drain(engine)
        for _ in range(3):
            prefill(engine, prompts, tokens, marks)
        watch = watch_clock() if marks.is_cuda else None
        samples = [prefill(engine, prompts, tokens, marks) for _ in range(options.repeats)]
        line: dict[str, Any] = {
            name: round(statistics.median(s[name] for s in samples), 3) for name in samples[0]
        }
        line.update(clock(watch))
        if marks.is_cuda:
            line["kernels"] = kernels(engine, prompts, tokens, marks, 6)
        line = origin.stamp(
            {
                "bench": "prefill_timeline",
                "size": options.size,
                "tokens": tokens,
                "only": only,
                **line,
            }
        )
        print(json.dumps(line), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
