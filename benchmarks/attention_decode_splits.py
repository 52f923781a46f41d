"""Into how many parts split-KV attention should cut a history: by calculation anywhere, timed where there is a GPU.

    PYTHONPATH=src python benchmarks/attention_decode_splits.py [--calculate] [--seconds 60] [--json FILE]

A captured step has the rows of its bucket, of which fewer are real: a batch of 17 runs as 24 rows, and the 7 others end
at once. The rule in force counts all rows; `one_wave` fills the chip once for the bucket and so has more programs left
for the real ones; `cheapest` also looks at what is left for a second wave. gpt-oss: 8 kv heads of 64, bf16, full
layers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from rose.bench.record import Origin, append
from rose.kernels import registry
from rose.runtime.graphs import BATCH_SIZES
from rose.utils.device import detect
from rose.utils.math import ceil_div

registry.load("attention_decode")
from rose.kernels.attention_decode import triton_impl as decode  # noqa: E402

KV_HEADS = 8
TOKEN_BYTES = 2 * KV_HEADS * 64 * 2
SLOTS = 132 * 8
"""Programs of two warps with 118 registers (`rose.kernels aot`) that the multiprocessors hold at once."""
PROGRAM_RATE = 10.1e9
"""Bytes/s that one program reads at most, and CHIP_RATE all together: fitted to the decode lines of
attention-triton-20261130.jsonl (8 x 8192 with 5 parts; 32 x 32768 with 3), which it repeats within 5 % where programs
are many; 5 and 9 parts of 32 x 32768, 580 and 524 us, come out as 563 and 533."""
CHIP_RATE = 4.55e12
LAUNCH_US = 8
"""Both kernels, their ends and the combination."""
BATCHES = (1, 2, 5, 8, 12, 17, 24, 32, 40, 48, 64, 140, 160, 192)
CONTEXTS = (1024, 8192, 32768, 128000)


def bucket(batch: int) -> int:
    """Return the rows of the graph that a batch runs in."""
    return next(rows for rows in BATCH_SIZES if rows >= batch)


def in_force(rows: int) -> int:
    """Return the parts that the kernel's rule gives: four programs to a multiprocessor, rounded up."""
    return decode.choose(rows, KV_HEADS, 131_072, None).num_splits


def one_wave(rows: int) -> int:
    """Return as many parts as all programs of the bucket find room for at once, one where not even those do."""
    return max(1, min(SLOTS // (rows * KV_HEADS), 128))


def cheapest(rows: int) -> int:
    """Return the fewest parts within 1 % of the least calculated time, over all batches of the bucket and two contexts.

    The calculation knows no cost of a part, so of equal ones the fewest.
    """
    batches = [batch for batch in range(1, rows + 1) if bucket(batch) == rows]

    def relative(parts: int) -> float:
        cells = itertools.product(batches, (8192, 32768))
        return sum(calculated_us(b, c, parts) / (b * c) for b, c in cells)

    times = {parts: relative(parts) for parts in range(1, 129)}
    return next(parts for parts, time_ in times.items() if time_ <= 1.01 * min(times.values()))


RULES = {"in force": in_force, "one wave": one_wave, "cheapest": cheapest}


def calculated_us(batch: int, context: int, parts: int) -> float:
    """Return the time of one layer: waves of programs, each wave at the rate that its programs reach."""
    blocks = ceil_div(context, 64)
    part_bytes = ceil_div(blocks, parts) * 64 * TOKEN_BYTES / KV_HEADS
    programs = batch * KV_HEADS * min(parts, blocks)
    seconds = 0.0
    while programs:
        running = min(programs, SLOTS)
        seconds += running * part_bytes / min(running * PROGRAM_RATE, CHIP_RATE)
        programs -= running
    return seconds * 1e6 + LAUNCH_US


class Timer:
    """Times launches on a GPU over real and padding rows, KV in random pages."""

    def __init__(self, batch: int, context: int) -> None:
        rows, pages = bucket(batch), ceil_div(context, 64)
        copies = max(1, min(8, int(160e6 / (batch * context * TOKEN_BYTES))))
        source = torch.Generator("cuda").manual_seed(0)
        self.sets = []
        for _ in range(copies):
            shape = (batch * pages, 2, KV_HEADS, 64, 64)
            kv = torch.randn(shape, generator=source, device="cuda", dtype=torch.bfloat16)
            table = torch.full((rows, pages), -1, dtype=torch.int32, device="cuda")
            order = torch.randperm(batch * pages, generator=source, device="cuda")
            table[:batch] = order.int().view(batch, pages)
            self.sets.append((kv, table))
        self.lengths = torch.zeros(rows, dtype=torch.int32, device="cuda")
        self.lengths[:batch] = context
        self.sinks = torch.randn(64, generator=source, device="cuda")
        self.q = torch.randn(rows, 64, 64, generator=source, device="cuda", dtype=torch.bfloat16)
        self.rows, self.batch, self.wanted = rows, batch, None

    def microseconds(self, parts: int) -> float:
        """Return the median of graph replays; results of all part counts must agree."""
        launch = replace(decode.choose(self.rows, KV_HEADS, 131_072, None), num_splits=parts)
        out, turn = torch.full_like(self.q, float("nan")), itertools.count()

        def call() -> None:
            kv, table = self.sets[next(turn) % len(self.sets)]
            decode.run(
                self.q, kv, table, self.lengths, self.sinks, scale=0.125, window_tokens=None,
                out_SHD=out, launch=launch,
            )  # fmt: skip

        call()
        result = out[: self.batch].float()
        self.wanted = result if self.wanted is None else self.wanted
        # Two bf16 roundings of the same sum.
        error = (result - self.wanted).norm() / self.wanted.norm()
        assert error < 5e-3, f"{parts} parts differ by {error:.1e}"
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(8):
                call()
        samples = []
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(20):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3 / 8)
        return sorted(samples)[len(samples) // 2]


def main() -> None:
    """Calculate, time where asked, print a line per cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calculate", action="store_true", help="time nothing")
    parser.add_argument("--seconds", type=float, default=60, help="begin no cell after so many")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args()
    facts = detect("cpu" if options.calculate else "cuda")
    origin = Origin.here(
        device="calculation" if options.calculate else facts.name, config="kernels", commit=options.commit,
        command=shlex.join(["python", "benchmarks/attention_decode_splits.py", *sys.argv[1:]]),
    )  # fmt: skip
    begin, num_late = time.monotonic(), 0
    for context, batch in itertools.product(CONTEXTS, BATCHES):
        parts = {name: rule(bucket(batch)) for name, rule in RULES.items()}
        line = {
            "bench": "attention_splits",
            "batch": batch,
            "rows": bucket(batch),
            "context": context,
        }
        line["parts"] = parts
        line["calculated_us"] = {
            n: round(calculated_us(batch, context, p), 1) for n, p in parts.items()
        }
        if not options.calculate:
            if time.monotonic() - begin > options.seconds:
                num_late += 1
                continue
            timer = Timer(batch, context)
            found = {p: round(timer.microseconds(p), 1) for p in sorted(set(parts.values()))}
            line["us"] = {name: found[p] for name, p in parts.items()}
        print(json.dumps(line), flush=True)
        append(options.json, origin.stamp(line))
    if num_late:
        sys.exit(f"no time for {num_late} cells")


if __name__ == "__main__":
    main()
