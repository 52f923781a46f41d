"""The second design of the CUDA experts for many tokens: check it on a GPU, then time it beside the bound one.

    PYTHONPATH=src python benchmarks/moe_prefill_fused.py --out fused.jsonl

Each way to run it is checked shape by shape and stage by stage in a process of its own, with waits that trap after
two seconds; after a trap the next shapes get a fresh process. MXFP4 must give the same bits as its expanded copy.
Ways with a mistake are not timed. Under two minutes; `--check-only` is under one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from rose.kernels import registry
from rose.kernels.moe_experts import cuda_fused, cuda_prefill
from rose.kernels.moe_experts.mxfp4_tiles import tiled
from rose.kernels.moe_experts.reference import swiglu

sys.path.insert(0, str(Path(__file__).parent))
from moe_prefill_probe import LADDER, SMALL, WIDE, Rung, by_expert, ids_of, problem, spread
from moe_prefill_variants import SIZES, balanced_ids, draw, time_us

ONE = {"D": 320, "I": 256, "K": 1}
MORE = [
    Rung(name="tile_ends_64", sizes={**ONE, "E": 4}, tokens=704, counts=(64, 128, 192, 320)),
    Rung(name="tile_ends_ragged", sizes={**ONE, "E": 5}, tokens=774, counts=(65, 129, 193, 257, 130)),
    Rung(name="half_run", sizes={"D": 192, "I": 64, "E": 3, "K": 1}, tokens=500, counts=(100, 0, 400)),
    Rung(name="one_half_stage", sizes={"D": 64, "I": 128, "E": 2, "K": 1}, tokens=300, counts=(10, 290)),
    Rung(name="many_tiles", sizes={"D": 320, "I": 320, "E": 16, "K": 4}, tokens=6000),
]  # fmt: skip
RUNGS = [r for r in (*LADDER[:14], *MORE) if r.weight == "fp8_block"]
RUNGS.append(Rung(name="wide_700", sizes={**WIDE, "E": 4}, tokens=700))
WAYS = {
    "mxfp4_r256": ("mxfp4", "r256"),
    "fp8_r256": ("fp8_block", "r256"),
    "fp8_r128": ("fp8_block", "r128"),
    "fp8_r128_late": ("fp8_block", "r128_late"),
}
assert SMALL["D"] % 64 == 0


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def same_bits(name: str, found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    a, b = found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
    if torch.equal(a, b):
        return None
    bad = torch.nonzero(a != b)
    return f"{name}: {len(bad)} bytes differ from the expanded copy's, first at {bad[0].tolist()}"


def walk(rung: Rung, way: str) -> Iterator[tuple[str, Callable[[], list[str | None]]]]:
    """Yield the stages of a way on one shape; each launches, then compares with torch on its own inputs."""
    weight, variant = WAYS[way]
    shapes = cuda_fused.VARIANTS[variant]
    library = cuda_fused.FusedLibrary(defines=["ROSE_WATCHDOG"])
    _, arguments = draw(rung.sizes, rung.tokens, weight, seed=1, **rung.options)
    if rung.counts:
        arguments["expert_ids_TK"] = ids_of(rung.counts)
    plain, x, ids = arguments["weights"], arguments["x_TD"], arguments["expert_ids_TK"]
    up, down_matrix, _ = cuda_fused.matrices(tiled(plain) if weight == "mxfp4" else plain)
    copy = None
    if weight == "mxfp4":
        from rose.kernels.moe_experts.cuda_prefill_impl import fp8_copy

        copy = cuda_fused.matrices(fp8_copy(plain))
    alpha, limit = arguments["swiglu_alpha"], arguments["swiglu_limit"]
    experts = rung.sizes["E"]
    kept: dict[str, Any] = {}

    def sort() -> list[str | None]:
        table = kept["table"] = library.sort_by_expert(
            ids, num_experts=experts, block_m=shapes.rows
        )
        torch.cuda.synchronize()
        flat = ids.flatten().long()
        order = torch.argsort(flat, stable=True)
        order = order[flat[order] >= 0]
        wanted = torch.full_like(flat, -1)
        wanted[order] = torch.arange(len(order), device=flat.device)
        counts = torch.bincount(flat[flat >= 0], minlength=experts)
        tile_counts = (counts + shapes.rows - 1) // shapes.rows
        tiles = [0, *tile_counts.cumsum(0).tolist()]
        pairs = [0, *(tile_counts // 2).cumsum(0).tolist()]
        owners = [e for e, (a, b) in enumerate(pairwise(tiles)) for _ in range(b - a)]
        kept["order"], kept["starts"] = order, [0, *counts.cumsum(0).tolist()]
        return [
            None if torch.equal(table.row_TK.flatten().long(), wanted) else "row_TK is wrong",
            None if table.starts_E1.tolist() == kept["starts"] else f"starts {table.starts_E1.tolist()}",
            None if table.tiles_E1.tolist() == tiles else f"tiles {table.tiles_E1.tolist()}",
            None if table.pairs_E1.tolist() == pairs else f"pairs {table.pairs_E1.tolist()}",
            None if table.expert_M[: tiles[-1]].tolist() == owners else "expert_M is wrong",
        ]  # fmt: skip

    def quantize() -> list[str | None]:
        kept["rows"] = library.quantize_rows(x, kept["table"])
        torch.cuda.synchronize()
        wanted = x.float()[kept["order"] // ids.shape[1]]
        # One rounding to E4M3, as in moe_prefill_probe.py.
        return [problem("x", spread(*kept["rows"], 128)[: len(wanted)], wanted, 4e-2, 5e-2)]

    def gate_up() -> list[str | None]:
        options = {
            "bias_EF": plain.gate_up_bias_EF,
            "alpha": alpha,
            "limit": limit,
            "late": shapes.late,
        }
        kept["hidden"] = library.gate_up(*kept["rows"], kept["table"], matrix=up, **options)
        torch.cuda.synchronize()
        count = kept["starts"][-1]
        x_RD = spread(*kept["rows"], 128)[:count]
        u_RF = by_expert(x_RD, kept["starts"], plain.gate_up, plain.gate_up_bias_EF)
        wanted = swiglu(u_RF, alpha=alpha, limit=limit)
        found = [problem("hidden", spread(*kept["hidden"], 128)[:count], wanted, 4e-2, 5e-2)]
        if copy:
            other = library.gate_up(*kept["rows"], kept["table"], matrix=copy[0], **options)
            found.append(same_bits("hidden", kept["hidden"][0][:count], other[0][:count]))
            found.append(same_bits("scales", kept["hidden"][1][:, :count], other[1][:, :count]))
        return found

    def down() -> list[str | None]:
        options = {"bias_ED": plain.down_bias_ED, "late": shapes.late}
        kept["y"] = library.down(*kept["hidden"], kept["table"], matrix=down_matrix, **options)
        torch.cuda.synchronize()
        count = kept["starts"][-1]
        hidden_RI = spread(*kept["hidden"], 128)[:count]
        wanted = by_expert(hidden_RI, kept["starts"], plain.down, plain.down_bias_ED)
        found = [problem("y", kept["y"][:count], wanted, 4e-3, 8e-3)]
        if copy:
            other = library.down(*kept["hidden"], kept["table"], matrix=copy[1], **options)
            found.append(same_bits("y", kept["y"][:count], other[:count]))
        return found

    def whole() -> list[str | None]:
        out = arguments["out_TD"]
        library.combine(kept["y"], kept["table"], arguments["expert_weights_TK"], out_TD=out)
        stages = out.clone()
        weights = tiled(plain) if weight == "mxfp4" else plain
        cuda_fused.run_experts(library, **{**arguments, "weights": weights}, shapes=shapes)
        torch.cuda.synchronize()
        rows = kept["table"].row_TK.long()
        picked = kept["y"].float()[rows.clamp_min(0)].masked_fill((rows < 0).unsqueeze(-1), 0)
        wanted = (picked * arguments["expert_weights_TK"].float().unsqueeze(-1)).sum(dim=1)
        repeated = None if torch.equal(out, stages) else "a second run differs"
        return [problem("out", out, wanted, 4e-3, 8e-3), repeated]

    yield from ((f.__name__, f) for f in (sort, quantize, gate_up, down, whole))


def check_here(way: str, first: int) -> int:
    """Check a way from the given shape on, one line per stage."""
    registry.load("moe_experts")
    for index, rung in enumerate(RUNGS[first:], first):
        for stage, step in walk(rung, way):
            print(f"begun {index} {stage}", flush=True)
            found = [p for p in step() if p]
            if found:
                print(f"wrong {rung.name} {stage}: " + "; ".join(found), flush=True)
    print("finished", flush=True)
    return 0


def check(way: str, deadline: float) -> dict[str, Any]:
    """Check all shapes of a way in as many processes as it takes."""
    began, first, wrong = time.monotonic(), 0, []
    while first < len(RUNGS):
        left = deadline - time.monotonic()
        if left < 8:
            wrong.append(f"no time left for {RUNGS[first].name} and later ones")
            break
        text, ended = child(["--check", way, "--first", str(first)], left)
        lines = text.splitlines()
        wrong += [line[6:] for line in lines if line.startswith("wrong ")]
        if "finished" in lines:
            break
        begun = [line.split() for line in lines if line.startswith("begun ")]
        at = int(begun[-1][1]) if begun else first
        stage = begun[-1][2] if begun else "before any stage"
        words = [line for line in lines if "Error" in line][-1:]
        wrong.append(f"{RUNGS[at].name} {stage}: {ended} {words}")
        first = at + 1
    return {
        "way": way,
        "ok": not wrong,
        "wrong": wrong,
        "seconds": round(time.monotonic() - began, 1),
    }


def child(options: list[str], seconds: float) -> tuple[str, str]:
    """Run this script again; return its words and how it ended."""
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"} if "--check" in options else {}
    process = subprocess.Popen(
        [sys.executable, __file__, *options], env={**os.environ, **blocking}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=seconds)
        return text, f"exit {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0], f"timeout after {seconds:.0f} s"


def time_here(way: str, model: str, routings: list[str], tokens: int) -> int:
    """Time the stages of a way, or of what is bound today (`bound`), on one model's size."""
    registry.load("moe_experts")
    weight, variant = WAYS.get(way, ("fp8_block" if model == "20b" else "mxfp4", ""))
    sizes = SIZES[model]
    weights = draw(sizes, 1, weight, seed=1)[1]["weights"]
    drawn = draw({**sizes, "I": 32}, tokens, "mxfp4", seed=2)[1]
    flops = 2 * tokens * sizes["K"] * sizes["D"] * sizes["I"]
    work = {"gate_up": 2 * flops, "down": flops, "whole": 3 * flops}
    prepared = tiled(weights) if weight == "mxfp4" else weights
    for routing in routings:
        ids = drawn["expert_ids_TK"]
        if routing == "balanced":
            ids = balanced_ids(tokens, sizes["E"], sizes["K"])
        arguments = {**drawn, "weights": prepared, "expert_ids_TK": ids}
        made = stages_of(arguments, cuda_fused.VARIANTS[variant]) if variant else bound(arguments)
        for stage, call in made.items():
            median, least = time_us(call, replays=5)
            line = {
                "bench": "moe_prefill_fused", "way": way, "model": model, "tokens": tokens, "routing": routing,
                "stage": stage, "median_us": round(median, 1), "min_us": round(least, 1),
            }  # fmt: skip
            if stage in work:
                line["tflops"] = round(work[stage] / median / 1e6, 1)
            say(**line)
    return 0


def stages_of(
    arguments: dict[str, Any], shapes: cuda_fused.FusedShapes
) -> dict[str, Callable[[], Any]]:
    """Return each stage as a closure over what the one before it wrote."""
    library = cuda_fused.FusedLibrary()
    up, down_matrix, plain = cuda_fused.matrices(arguments["weights"])
    ids, x = arguments["expert_ids_TK"], arguments["x_TD"]
    late = shapes.late

    def sort() -> Any:
        return library.sort_by_expert(ids, num_experts=up.shape[0], block_m=shapes.rows)

    table = sort()
    rows = library.quantize_rows(x, table)

    def gate_up() -> Any:
        return library.gate_up(
            *rows,
            table,
            matrix=up,
            bias_EF=plain.gate_up_bias_EF,
            alpha=1.702,
            limit=7.0,
            late=late,
        )

    hidden = gate_up()
    return {
        "sort": sort,
        "quantize": lambda: library.quantize_rows(x, table),
        "gate_up": gate_up,
        "down": lambda: library.down(
            *hidden, table, matrix=down_matrix, bias_ED=plain.down_bias_ED, late=late
        ),
        "whole": lambda: cuda_fused.run_experts(library, **arguments, shapes=shapes),
    }


def bound(arguments: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return the whole operation as it is bound today, and its stages with fp8_block."""
    from rose.kernels.moe_experts import cuda_prefill_impl as today

    weights = arguments["weights"]
    if not hasattr(weights, "gate_up"):
        return {"whole": lambda: today.moe_experts_expanding(**arguments)}
    library = today.LIBRARY
    ids, x = arguments["expert_ids_TK"], arguments["x_TD"]
    table = library.sort_by_expert(ids, num_experts=weights.gate_up.values.shape[0])
    rows = library.quantize_rows(x, table)

    def gate_up() -> Any:
        return library.gate_up(
            *rows, table, values_EFD=weights.gate_up.values, scales=weights.gate_up.scales,
            bias_EF=weights.gate_up_bias_EF, alpha=1.702, limit=7.0, columns=cuda_prefill.DEFAULT.gate_up,
        )  # fmt: skip

    hidden = gate_up()
    return {
        "sort": lambda: library.sort_by_expert(ids, num_experts=weights.gate_up.values.shape[0]),
        "quantize": lambda: library.quantize_rows(x, table),
        "gate_up": gate_up,
        "down": lambda: library.down(
            *hidden, table, values_EDI=weights.down.values, scales=weights.down.scales,
            bias_ED=weights.down_bias_ED, group=128, columns=cuda_prefill.DEFAULT.down,
        ),
        "whole": lambda: today.moe_experts(**arguments),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", default="", choices=["", *WAYS], help="check this way here")
    parser.add_argument("--first", type=int, default=0, help="with --check: shape to begin with")
    parser.add_argument(
        "--time", default="", choices=["", "bound", *WAYS], help="time this way here"
    )
    parser.add_argument("--model", default="20b", choices=list(SIZES))
    parser.add_argument("--routing", nargs="+", default=["balanced", "random"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--seconds", type=float, default=115.0, help="for everything")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.check:
        return check_here(arguments.check, arguments.first)
    if arguments.time:
        return time_here(arguments.time, arguments.model, arguments.routing, arguments.tokens)
    began = time.monotonic()
    builds = [cuda_fused.FusedLibrary(defines=d).library for d in ([], ["ROSE_WATCHDOG"])]
    builds.append(cuda_prefill.PrefillLibrary().library)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda library: library.build(), builds))
    say(stage="built", seconds=round(time.monotonic() - began, 1))
    with ThreadPoolExecutor(len(WAYS)) as pool:
        outcomes = list(pool.map(lambda way: check(way, began + arguments.seconds * 0.6), WAYS))
    for outcome in outcomes:
        say(bench="moe_prefill_fused_check", **outcome)
    good = [o["way"] for o in outcomes if o["ok"]]
    runs = [(way, "120b") for way in ("bound", "mxfp4_r256")]
    runs += [(way, "20b") for way in ("bound", *WAYS)]
    for way, model in [] if arguments.check_only else runs:
        if way not in (*good, "bound"):
            continue
        left = began + arguments.seconds - time.monotonic()
        if left < 5:
            say(skipped=[way, model], reason="no time left")
            continue
        text, ended = child(
            ["--time", way, "--model", model, "--tokens", str(arguments.tokens)], left
        )
        lines = [line for line in text.splitlines() if line.startswith("{")]
        print("\n".join(lines), flush=True)
        if ended != "exit 0":
            say(way=way, model=model, ended=ended, words=text.splitlines()[-2:])
        if arguments.out:
            with arguments.out.open("a") as file:
                file.writelines(line + "\n" for line in lines)
    say(
        seconds=round(time.monotonic() - began, 1),
        wrong=[o["way"] for o in outcomes if not o["ok"]],
    )
    return int(len(good) < len(WAYS))


if __name__ == "__main__":
    sys.exit(main())
