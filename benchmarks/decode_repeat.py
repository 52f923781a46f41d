"""Run the ring and the experts of benchmarks/unbound again and again on the same inputs: no bit may ever differ.

    PYTHONPATH=src python benchmarks/decode_repeat.py [--seconds 60] [--out FILE.jsonl]

A check against the reference forgives what is rare and small. Here gate_up and down run 30 times each on four inputs,
and every launch shape has to give the same bits, since each sums a row in the same order. What differs is printed:
which pairs, their expert and place in it, which columns, and the ratio to what was first.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
from decode_variants import EXPERTS, INNER, D, K, Recorder, _moe_calls, expert_layers, short
from decode_variants2 import RING
from torch import Tensor
from unbound import e4m3

from rose.kernels.moe_experts.cuda_decode_calls import DecodeExperts, Launch

SIXTEEN_WARPS, TWELVE_WARPS, SIXTEEN_WIDE, FIRST = e4m3.SHAPES
TURNS = 30
CELLS = (("20b", 64), ("120b", 128), ("20b", 128), ("120b", 256), ("20b", 32))


def runs(batch: int) -> list[tuple[str, DecodeExperts, Launch]]:
    """Return (name, what launches, shape); those of a kernel are held against its first."""
    found = [("ring", RING.EXPERTS, RING.CHOSEN)] if batch <= RING.MAX_TOKENS else []
    found += [("e4m3", e4m3.EXPERTS, s) for s in (FIRST, SIXTEEN_WARPS, TWELVE_WARPS, SIXTEEN_WIDE)]
    found.append(("e4m3", e4m3.EXPERTS, replace(SIXTEEN_WARPS, is_dependent=False)))
    return found


def tell(name: str, found: Tensor, right: Tensor, ids: Tensor) -> None:
    """Print what differs."""
    kind = torch.int16 if found.dtype == torch.bfloat16 else torch.int32
    differs = found.view(kind) != right.view(kind)
    pairs = differs.any(1).nonzero().flatten().tolist()
    print(f"  {name}: {int(differs.sum())} numbers of {len(pairs)} pairs", flush=True)
    for pair in pairs[:9]:
        expert = ids[pair]
        place, count = int((ids[:pair] == expert).sum()), int((ids == expert).sum())
        columns = differs[pair].nonzero().flatten()
        ratios = (found[pair][columns].float() / right[pair][columns].float())[:6].tolist()
        print(
            f"    pair {pair}, {place} of {count} of expert {int(expert)}: columns {columns.tolist()[:20]} "
            f"to {int(columns[-1])}, ratios {[round(r, 3) for r in ratios]}",
            flush=True,
        )


def repeat(model: str, batch: int, deadline: float, out: Recorder) -> None:
    """Run all shapes on inputs of one model and batch."""
    experts = EXPERTS[model]
    sizes = {"D": D, "I": INNER, "E": experts, "K": K}
    calls, _ = _moe_calls(batch, experts, expert_layers(experts))
    first: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
    for words, kernel, shape in runs(batch):
        fits = RING.fits if words == "ring" else e4m3.fits
        line = {"op": f"repeat_{model}", "batch": batch, "config": f"{words} {short(shape)}"}
        if time.time() > deadline or not fits(shape, batch, sizes):
            print(f"{line}: {'no time' if time.time() > deadline else 'does not fit'}", flush=True)
            continue
        told, different = 0, {"act": 0, "y": 0}
        for number, call in enumerate(calls[:4]):
            ids, weights = call["expert_ids_TK"], call["weights"]
            for _ in range(TURNS):
                act = torch.full((batch * K, INNER), float("nan"), device="cuda").bfloat16()
                y = torch.full((batch * K, D), float("nan"), device="cuda")
                kernel.gate_up(shape, call["x_TD"], ids, weights, act, alpha=1.702, limit=7.0)
                # Starts while gate_up drains, as in a step.
                kernel.down(shape, act, ids, weights, y)
                key = words, number
                rights = first.setdefault(key, (act, y))
                for name, found, right in zip(("act", "y"), (act, y), rights, strict=True):
                    kind = torch.int16 if name == "act" else torch.int32
                    if torch.equal(found.view(kind), right.view(kind)):
                        continue
                    different[name] += 1
                    if told < 3:
                        told += 1
                        tell(name, found, right, ids.flatten())
        out.add(**line, runs=4 * TURNS, different_act=different["act"], different_y=different["y"])
        print(
            f"{model} {batch} {line['config']}: of {4 * TURNS} runs differ {different}", flush=True
        )


def main() -> int:
    """Compile side by side, then repeat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    deadline = time.time() + args.seconds
    libraries = [RING.LIBRARY, e4m3.LIBRARY]
    threads = [threading.Thread(target=library.build) for library in libraries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("compiled", flush=True)
    out = Recorder(args.out, None)
    for model, batch in CELLS:
        repeat(model, batch, deadline, out)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
