"""Check and time the decode experts of one launch (benchmarks/unbound/whole*) beside those in force.

    PYTHONPATH=src python benchmarks/decode_whole.py --ops 20b 120b [--batches 1 2 4 8 16 32 48]
        [--out FILE.jsonl] [--seconds 60]

As decode_variants2.py does it: every launch shape is held against the reference before it is timed. Then a build that
notes times runs at the first of the batches, and a table says when, on the median block and on the last one, each step
was reached: microseconds after the first block began.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch
from decode_variants import EXPERTS, INNER, D, K, Recorder, _moe_calls, expert_layers
from decode_variants2 import STREAM, bench_moe, parse, run_all
from unbound import whole

from rose.kernels.moe_experts.cuda_decode_calls import Launch

REPEATS = 24
SIZES = {"D": D, "I": INNER, "K": K}


def shapes(batch: int, experts: int) -> list[Launch]:
    """Return the launch shapes worth timing: two blocks to a multiprocessor, or one with a deeper ring."""
    sizes = {**SIZES, "E": experts}
    wanted = [Launch(blocks_per_sm=2, stages=4), Launch(stages=8)]
    if batch > 8:
        wanted += [Launch(blocks_per_sm=2, stages=4, width=16), Launch(stages=8, width=16)]
    fitted = [STREAM.fitted(shape, batch, sizes) for shape in wanted]
    return [shape for shape in fitted if shape is not None]


def variants(batch: int, experts: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, what has `launch`, launch shape), the one in force first."""
    yield "stream", STREAM.EXPERTS, STREAM.choose(batch, {**SIZES, "E": experts})
    for shape in shapes(batch, experts):
        yield "whole", whole.EXPERTS, shape


def timeline(model: str, batch: int, out: Recorder) -> None:
    """Print and record when the steps of one call were reached."""
    layers = expert_layers(EXPERTS[model])
    calls, _ = _moe_calls(batch, EXPERTS[model], layers)
    experts = whole.WholeExperts(whole.TIMELINE)
    for shape in shapes(batch, EXPERTS[model]):
        blocks = whole.num_blocks(shape, calls[0]["x_TD"])
        marks_BM = torch.zeros(blocks, len(whole.MARKS), dtype=torch.int64, device="cuda")
        middles, lasts = [], []
        for i in range(REPEATS):
            experts.launch(shape, **calls[i % len(calls)], marks_BM=marks_BM)
            torch.cuda.synchronize()
            after_BM = (marks_BM - marks_BM[:, 0].min()).double() / 1e3
            middles.append(after_BM.median(0).values.tolist())
            lasts.append(after_BM.max(0).values.tolist())
        rows = [
            [statistics.median(row[m] for row in rows) for m in range(len(whole.MARKS))]
            for rows in (middles, lasts)
        ]
        config = f"whole {shape.blocks_per_sm} x {shape.stages} stages, width {shape.width}"
        print(f"\n{model}, {batch} tokens, {config}: us after the first block began")
        for name, middle, last in zip(whole.MARKS, *rows, strict=True):
            print(f"{name:20} median block {middle:7.2f}   last block {last:7.2f}", flush=True)
        out.add(
            op=f"timeline_{model}", batch=batch, config=config,
            median_us=dict(zip(whole.MARKS, rows[0], strict=True)),
            last_us=dict(zip(whole.MARKS, rows[1], strict=True)),
        )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Check, time and print one model."""
    out = Recorder(args.out, None)
    bench_moe(args.do, args, out, variants)
    out.table(args.keep)
    for batch in args.batches[:1]:
        timeline(args.do, batch, out)
    if out.late:
        print(f"{args.do}: no time left for {out.late}", flush=True)


def main() -> int:
    """Compile, check, time, print."""
    args = parse(__doc__)
    if args.do is None:
        return run_all(args, [STREAM.LIBRARY, whole.LIBRARY, whole.TIMELINE], __file__)
    assert args.do in EXPERTS, f"{args.do!r}; takes {', '.join(EXPERTS)}"
    run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
