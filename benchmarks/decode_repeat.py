"""Run the decode experts that multiply as E4M3 again and again on the same inputs: no bit may ever differ.

    PYTHONPATH=src python benchmarks/decode_repeat.py [--seconds 60] [--out FILE.jsonl]

A check against the reference forgives what is rare and small. Here gate_up and down run 30 times each on four inputs,
and every launch shape has to give the same bits, since each sums a row in the same order. What differs is printed:
which pairs, their expert and place in it, which columns, and the ratio to what was first.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from decode_variants import EXPERTS, INNER, D, K, Recorder, expert_layers, moe_calls, short
from decode_variants2 import E4M3
from torch import Tensor

from rose.kernels.moe_experts.cuda_decode_calls import Launch

TURNS = 30
CELLS = (("20b", 64), ("120b", 128), ("20b", 128), ("120b", 256), ("20b", 32))
TOLD = 3
"""Differing runs of a launch shape that are printed."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A kernel with one launch shape."""

    name: str
    """Of the kernel: contenders of one name have to give the same bits."""
    experts: Any
    """Has launch, gate_up and down, as `DecodeExperts`."""
    shape: Launch

    @property
    def config(self) -> str:
        """Return what lines call it."""
        return f"{self.name} {short(self.shape)}"


Firsts = dict[tuple[str, int], tuple[Tensor, Tensor]]
"""(name, number of the input) -> what the first run gave: SwiGLU and output rows."""


def runs(batch: int, experts: int) -> list[Contender]:
    """Return what fits, the shape with most tokens a pass first."""
    sizes = {"D": D, "I": INNER, "E": experts, "K": K}
    shapes = (*reversed(E4M3.SHAPES), replace(E4M3.EIGHT, is_dependent=False))
    return [
        Contender("e4m3", E4M3.EXPERTS, shape) for shape in shapes if E4M3.fits(shape, batch, sizes)
    ]


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


def differing(
    contender: Contender, calls: list[dict[str, Any]], first: Firsts, turns: int = TURNS
) -> dict[str, int]:
    """Return how many of the runs differ from the first of the kernel's name, by SwiGLU and output; print a few."""
    told, different = 0, {"act": 0, "y": 0}
    for number, call in enumerate(calls):
        x_TD, ids_TK, weights = call["x_TD"], call["expert_ids_TK"], call["weights"]
        _, hidden, inner = weights.down.shape
        for _ in range(turns):
            act = x_TD.new_full((ids_TK.numel(), inner), float("nan"))
            y = x_TD.new_full((ids_TK.numel(), hidden), float("nan"), dtype=torch.float32)
            contender.experts.gate_up(
                contender.shape, x_TD, ids_TK, weights, act, alpha=1.702, limit=7.0
            )
            # Starts while gate_up drains, as in a step.
            contender.experts.down(contender.shape, act, ids_TK, weights, y)
            rights = first.setdefault((contender.name, number), (act, y))
            for name, found, right in zip(("act", "y"), (act, y), rights, strict=True):
                kind = torch.int16 if name == "act" else torch.int32
                if torch.equal(found.view(kind), right.view(kind)):
                    continue
                different[name] += 1
                if told < TOLD:
                    told += 1
                    tell(name, found, right, ids_TK.flatten())
    return different


def repeat(model: str, batch: int, deadline: float, out: Recorder) -> None:
    """Run all shapes on inputs of one model and batch."""
    calls, _ = moe_calls(batch, EXPERTS[model], expert_layers(EXPERTS[model]))
    first: Firsts = {}
    for contender in runs(batch, EXPERTS[model]):
        line = {"op": f"repeat_{model}", "batch": batch, "config": contender.config}
        if time.time() > deadline:
            print(f"{line}: no time", flush=True)
            continue
        different = differing(contender, calls[:4], first)
        total = 4 * TURNS
        out.add(**line, runs=total, different_act=different["act"], different_y=different["y"])
        print(f"{model} {batch} {line['config']}: of {total} runs differ {different}", flush=True)


def main() -> int:
    """Compile, then repeat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    deadline = time.time() + args.seconds
    E4M3.LIBRARY.build()
    print("compiled", flush=True)
    out = Recorder(args.out, None)
    for model, batch in CELLS:
        repeat(model, batch, deadline, out)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
