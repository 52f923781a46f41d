"""Check and time the decode experts of benchmarks/unbound beside those in force.

    PYTHONPATH=src python benchmarks/decode_unbound.py --ops 20b 120b [--batches 1 8 32 64 128]
        [--out FILE.jsonl] [--seconds 60]

As decode_variants2.py does it: sources are compiled side by side, each model runs in a process of its own, every
launch shape is held against the reference before it is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from decode_variants import EXPERTS, INNER, D, K, Recorder
from decode_variants2 import RING, STREAM, bench_moe, parse, run_all
from unbound import e4m3


def variants(batch: int, experts: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, what has `launch`, launch shape), those in force first."""
    sizes = {"D": D, "I": INNER, "E": experts, "K": K}
    yield "stream", STREAM.EXPERTS, STREAM.choose(batch, sizes)
    mean = batch * K / experts
    if mean > 4:
        yield "ring", RING.EXPERTS, RING.CHOSEN
    for shape in e4m3.SHAPES:
        is_wide_enough = mean <= shape.width and (shape.width == 8 or mean >= shape.width / 4)
        if is_wide_enough and e4m3.fits(shape, batch, sizes):
            yield "e4m3", e4m3.EXPERTS, shape


def main() -> int:
    """Compile, check, time, print."""
    args = parse(__doc__)
    if args.do is None:
        return run_all(args, [STREAM.LIBRARY, RING.LIBRARY, e4m3.LIBRARY], __file__)
    assert args.do in EXPERTS, f"{args.do!r}; takes {', '.join(EXPERTS)}"
    out = Recorder(args.out, None)
    bench_moe(args.do, args, out, variants)
    out.table(args.keep)
    if out.late:
        print(f"{args.do}: no time left for {out.late}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
