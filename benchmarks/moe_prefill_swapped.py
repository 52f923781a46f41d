"""The CUDA experts with swapped operands: check them on a GPU, then time them beside the fused ones.

    PYTHONPATH=src python benchmarks/moe_prefill_swapped.py --out swapped.jsonl

Checks as in moe_prefill_fused.py: shape by shape, waits trap after two seconds, a fresh process after a trap. The
quantised rows must be the fused ones' bits in another order; products and the whole are compared with torch. Then,
where all is right, the 120b and the 20b are timed, balanced and random, ways in turn, and the kernel is taken apart.
Under 60 seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rose.kernels import registry
from rose.kernels.build import CudaLibrary, default_cache
from rose.kernels.moe_experts import cuda_fused, cuda_swapped
from rose.kernels.moe_experts.cuda_swapped import SwappedLibrary
from rose.kernels.moe_experts.mxfp4_tiles import tiled
from rose.kernels.moe_experts.reference import swiglu
from rose.kernels.moe_experts.swapped_tables import with_offsets

sys.path.insert(0, str(Path(__file__).parent))
import moe_prefill_fused as bound
from moe_prefill_inputs import (
    SIZES,
    WIDE,
    Rung,
    balanced_ids,
    by_expert,
    draw,
    ids_of,
    problem,
    spread,
)

EDGES = (1, 63, 64, 65, 96, 97, 127, 128, 129, 255, 256, 257, 0, 385)
RUNGS = [
    *bound.RUNGS,
    Rung(name="edges", sizes={"D": 448, "I": 320, "E": len(EDGES), "K": 1}, tokens=sum(EDGES), counts=EDGES),
    Rung(name="wide_3000", sizes={**WIDE, "E": 16}, tokens=3000),
]  # fmt: skip
WITHOUT = {
    "without_scales": [
        (
            "const float scale0 = load_shared(scales + 32 * j), scale1 = load_shared(scales + 32 * j + 4);",
            "const float scale0 = 0.5f + j, scale1 = 0.25f * j;",
        )
    ],
    "without_expansion": [
        ("    expand<P, 4>(a[0], 0, next + P::kCodesAt + mine.codes, offsets, table);\n", ""),
        ("  if (has_next) expand<P, 4>(a[1], 1, next + P::kCodesAt + mine.codes, offsets, table);\n", ""),
    ],
    "without_promotion": [
        ("j < kN / 8; ++j) {\n    const float scale0", "j < 1; ++j) {\n    const float scale0"),
    ],
}  # fmt: skip
"""The kernel taken apart: wrong results, but their time says what a part costs."""
WAY = "swapped_3"
FUSED = {"fused_mxfp4": "r256", "fused_copy": "r128"}
"""What is timed beside: the 120b's way before operands were swapped, and the 20b's with its FP8 copy."""


def walk(rung: Rung) -> Iterator[tuple[str, Callable[[], list[str | None]]]]:
    """Yield the stages on one shape; each launches, then compares with torch on its own inputs."""
    library = SwappedLibrary(defines=["ROSE_WATCHDOG"])
    _, arguments = draw(rung.sizes, rung.tokens, "mxfp4", seed=1, **rung.options)
    if rung.counts:
        arguments["expert_ids_TK"] = ids_of(rung.counts)
    plain, x, ids = arguments["weights"], arguments["x_TD"], arguments["expert_ids_TK"]
    weights = with_offsets(plain)
    table = bound.table_of(ids, rung.sizes["E"], cuda_swapped.ROWS)
    starts = table.starts_E1.tolist()
    count = starts[-1]
    alpha, limit = arguments["swiglu_alpha"], arguments["swiglu_limit"]
    kept: dict[str, Any] = {}

    def quantize() -> list[str | None]:
        kept["x"] = library.quantize_rows(x, table)
        torch.cuda.synchronize()
        values, scales = cuda_fused.FusedLibrary().quantize_rows(x, table)
        found = cuda_swapped.in_order(kept["x"][0])
        return [
            bound.same_bits("x", found[:count], values[:count]),
            bound.same_bits("scales", kept["x"][1][:, :count], scales[:, :count]),
        ]

    def gate_up() -> list[str | None]:
        values, scales = kept["x"]
        kept["hidden"] = library.gate_up(
            values, scales, table, matrix=weights.gate_up, bias_EF=plain.gate_up_bias_EF,
            alpha=alpha, limit=limit,
        )  # fmt: skip
        torch.cuda.synchronize()
        x_RD = spread(cuda_swapped.in_order(values), scales, 128)[:count]
        wanted = swiglu(
            by_expert(x_RD, starts, plain.gate_up, plain.gate_up_bias_EF), alpha=alpha, limit=limit
        )
        hidden, hidden_scales = kept["hidden"]
        found = spread(cuda_swapped.in_order(hidden), hidden_scales, 128)[:count]
        return [problem("hidden", found, wanted, 4e-2, 5e-2)]

    def down() -> list[str | None]:
        hidden, scales = kept["hidden"]
        y = library.down(hidden, scales, table, matrix=weights.down, bias_ED=plain.down_bias_ED)
        torch.cuda.synchronize()
        hidden_RI = spread(cuda_swapped.in_order(hidden), scales, 128)[:count]
        wanted = by_expert(hidden_RI, starts, plain.down, plain.down_bias_ED)
        return [problem("y", y[:count], wanted, 4e-3, 8e-3)]

    def whole() -> list[str | None]:
        found = []
        for _ in range(2):
            cuda_swapped.run_experts(library, **{**arguments, "weights": weights})
            torch.cuda.synchronize()
            found.append(arguments["out_TD"].clone())
        cuda_fused.run_experts(cuda_fused.FusedLibrary(), **{**arguments, "weights": tiled(plain)})
        repeated = None if torch.equal(*found) else "a second run differs"
        # Sums of 32 products are taken over other columns, and the SwiGLU is fp16 before it is E4M3: a few hidden
        # values land one E4M3 step away (docs/numerics.md, moe_experts rounded to E4M3).
        return [problem("out", found[0], arguments["out_TD"], 2e-2, 4e-2), repeated]

    yield from {"quantize": quantize, "gate_up": gate_up, "down": down, "whole": whole}.items()


def check_here(first: int) -> int:
    """Check from the given shape on, one line per stage."""
    registry.load("moe_experts")
    for index, rung in enumerate(RUNGS[first:], first):
        for stage, step in walk(rung):
            print(f"begun {index} {stage}", flush=True)
            found = [p for p in step() if p]
            if found:
                print(f"wrong {rung.name} {stage}: " + "; ".join(found), flush=True)
    print("finished", flush=True)
    return 0


def time_here(
    ways: list[str], model: str, routings: list[str], tokens: int, stages: list[str], rounds: int
) -> int:
    """Time the stages of ways on one model's size, ways in turn."""
    registry.load("moe_experts")
    sizes = SIZES[model]
    drawn = draw({**sizes, "I": 32}, tokens, "mxfp4", seed=2)[1]
    ids = {
        "random": drawn["expert_ids_TK"],
        "balanced": balanced_ids(tokens, sizes["E"], sizes["K"]),
    }
    plain = draw(sizes, 1, "mxfp4", seed=1)[1]["weights"]
    prepared: dict[str, Any] = {}
    for way in ways:
        if way == "fused_mxfp4":
            prepared[way] = tiled(plain)
        elif way == "fused_copy":
            prepared[way] = draw(sizes, 1, "fp8_block", seed=1)[1]["weights"]
        else:
            prepared[way] = with_offsets(plain)
    for routing in routings:
        arguments = {**drawn, "expert_ids_TK": ids[routing]}
        calls = {}
        for way in ways:
            given = {**arguments, "weights": prepared[way]}
            if way in FUSED:
                calls[way] = bound.stages_of(given, cuda_fused.VARIANTS[FUSED[way]])
            else:
                calls[way] = stages_of(given)
        for turn in range(rounds):
            for stage in stages:
                for way in ways:
                    labels = {"way": way, "model": model, "tokens": tokens, "routing": routing}
                    if stage in calls[way]:
                        line = bound.timed(calls[way][stage], stage, **labels)
                        bound.say(**{**line, "bench": "moe_prefill_swapped", "turn": turn})
    return 0


def stages_of(
    arguments: dict[str, Any], library: SwappedLibrary | None = None
) -> dict[str, Callable[[], Any]]:
    """Return each stage as a closure over what the ones before made."""
    library = library or SwappedLibrary()
    weights, x = arguments["weights"], arguments["x_TD"]
    plain = weights.weights
    table = bound.table_of(arguments["expert_ids_TK"], weights.gate_up.shape[0], cuda_swapped.ROWS)
    values, scales = library.quantize_rows(x, table)

    def gate_up() -> tuple[Tensor, Tensor]:
        return library.gate_up(
            values, scales, table, matrix=weights.gate_up, bias_EF=plain.gate_up_bias_EF,
            alpha=1.702, limit=7.0,
        )  # fmt: skip

    hidden, hidden_scales = gate_up()
    return {
        "quantize": lambda: library.quantize_rows(x, table),
        "gate_up": gate_up,
        "down": lambda: library.down(
            hidden,
            hidden_scales,
            table,
            matrix=weights.down,
            bias_ED=plain.down_bias_ED,
        ),
        "whole": lambda: cuda_swapped.run_experts(library, **arguments),
    }


def library_without(name: str) -> SwappedLibrary:
    """Return the kernels with a part taken out, from a copy of their sources."""
    source = Path(cuda_swapped.__file__).parent
    folder = default_cache() / "taken_apart" / name
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*source.glob("prefill_*.cuh"), source / "prefill_swapped_sm90.cu"):
        text = path.read_text()
        for old, new in WITHOUT[name] if path.name == "prefill_swapped.cuh" else ():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / path.name).write_text(text)
    return SwappedLibrary(CudaLibrary(folder / "prefill_swapped_sm90.cu"))


def take_apart(model: str, tokens: int) -> int:
    """Time both products without a part of theirs, balanced routing."""
    registry.load("moe_experts")
    sizes = SIZES[model]
    drawn = draw({**sizes, "I": 32}, tokens, "mxfp4", seed=2)[1]
    weights = with_offsets(draw(sizes, 1, "mxfp4", seed=1)[1]["weights"])
    ids = balanced_ids(tokens, sizes["E"], sizes["K"])
    for way in ("", *WITHOUT):
        calls = stages_of(
            {**drawn, "weights": weights, "expert_ids_TK": ids},
            library_without(way) if way else None,
        )
        labels = {
            "way": f"{WAY} {way}".strip(),
            "model": model,
            "tokens": tokens,
            "routing": "balanced",
        }
        for stage in ("gate_up", "down"):
            line = bound.timed(calls[stage], stage, **labels)
            bound.say(**{**line, "bench": "moe_prefill_swapped_ablation"})
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", default="", choices=["", WAY], help="check this here")
    parser.add_argument("--first", type=int, default=0, help="with --check: shape to begin with")
    parser.add_argument("--time", nargs="+", default=[], choices=[WAY, *FUSED], help="here")
    parser.add_argument("--model", default="120b", choices=list(SIZES))
    parser.add_argument("--routing", nargs="+", default=["balanced", "random"])
    parser.add_argument("--stages", nargs="+", default=["gate_up", "down", "whole"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--take-apart", action="store_true", help="time without parts, here")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--seconds", type=float, default=59.0, help="for everything")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    if given.check:
        return check_here(given.first)
    if given.time:
        return time_here(
            given.time, given.model, given.routing, given.tokens, given.stages, given.rounds
        )
    if given.take_apart:
        return take_apart(given.model, given.tokens)
    began = time.monotonic()
    builds = [
        library.library
        for defines in ([], ["ROSE_WATCHDOG"])
        for library in (SwappedLibrary(defines=defines), cuda_fused.FusedLibrary(defines=defines))
    ]
    builds += [library_without(name).library for name in WITHOUT]
    with ThreadPoolExecutor(len(builds)) as pool:
        list(pool.map(lambda library: library.build(), builds))
    bound.say(stage="built", seconds=round(time.monotonic() - began, 1))
    deadline = began + given.seconds * 0.6
    outcome = bound.check(WAY, deadline, __file__)
    bound.say(bench="moe_prefill_swapped_check", **outcome)
    mxfp4 = ["--time", "fused_mxfp4", WAY]
    plans: list[list[str]] = [
        [*mxfp4, "--routing", "random"],
        [*mxfp4, "--routing", "balanced"],
        [*mxfp4, "--routing", "random", "--tokens", "2048", "--stages", "whole"],
        ["--time", "fused_copy", WAY, "--model", "20b", "--routing", "random", "--stages", "whole"],
        ["--take-apart"],
    ]
    for options in plans if outcome["ok"] and not given.check_only else []:
        left = began + given.seconds - time.monotonic()
        text, ended = bound.child(options, max(left, 5.0), __file__)
        lines = [line for line in text.splitlines() if line.startswith("{")]
        print("\n".join(lines), flush=True)
        if ended != "exit 0":
            bound.say(options=options, ended=ended, words=text.splitlines()[-2:])
        if given.out:
            with given.out.open("a") as file:
                file.writelines(line + "\n" for line in lines)
    bound.say(seconds=round(time.monotonic() - began, 1), wrong=outcome["wrong"])
    return int(not outcome["ok"])


if __name__ == "__main__":
    sys.exit(main())
