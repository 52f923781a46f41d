"""The CUDA experts for many tokens: check every way to run them on a GPU, then time them.

    PYTHONPATH=src python benchmarks/moe_prefill_fused.py --out fused.jsonl

Each way to run the products is checked shape by shape in a process of its own, with waits that trap after two
seconds; after a trap the next shapes get a fresh process. MXFP4 must give the same bits as its expanded copy. The new
sort and quantisation (`rows`) and all of it together (`whole`) are ways of their own, so that a mistake in one hides
nothing of the others. Ways with a mistake are not timed. Under two minutes; `--check-only` is under one.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rose.kernels import registry
from rose.kernels.moe_experts import cuda_fused
from rose.kernels.moe_experts.cuda_fused import FusedLibrary
from rose.kernels.moe_experts.mxfp4_tiles import tiled
from rose.kernels.moe_experts.reference import swiglu
from rose.kernels.moe_experts.rows import RowTable, allocate_rows

sys.path.insert(0, str(Path(__file__).parent))
from moe_prefill_inputs import (
    LADDER,
    ONE,
    SIZES,
    SMALL,
    WIDE,
    Rung,
    balanced_ids,
    by_expert,
    draw,
    ids_of,
    problem,
    spread,
    time_us,
)

MORE = [
    Rung(name="tile_ends_64", sizes={**ONE, "E": 4}, tokens=704, counts=(64, 128, 192, 320)),
    Rung(name="tile_ends_ragged", sizes={**ONE, "E": 5}, tokens=774, counts=(65, 129, 193, 257, 130)),
    Rung(name="half_run", sizes={"D": 192, "I": 64, "E": 3, "K": 1}, tokens=500, counts=(100, 0, 400)),
    Rung(name="one_half_stage", sizes={"D": 64, "I": 128, "E": 2, "K": 1}, tokens=300, counts=(10, 290)),
    Rung(name="many_tiles", sizes={"D": 320, "I": 320, "E": 16, "K": 4}, tokens=6000),
]  # fmt: skip
RUNGS = [*LADDER[:14], *MORE]
RUNGS.append(Rung(name="wide_700", sizes={**WIDE, "E": 4}, tokens=700))
PRODUCTS = {
    "mxfp4_r256": ("mxfp4", "r256"),
    "fp8_r256": ("fp8_block", "r256"),
    "fp8_r128": ("fp8_block", "r128"),
}
WAYS = {"rows": ("fp8_block", "r256"), **PRODUCTS, "whole": ("mxfp4", "r256")}
assert SMALL["D"] % 64 == 0


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def same_bits(name: str, found: Tensor, wanted: Tensor) -> str | None:
    a, b = found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
    if torch.equal(a, b):
        return None
    bad = torch.nonzero(a != b)
    return f"{name}: {len(bad)} bytes differ from the expanded copy's, first at {bad[0].tolist()}"


def table_of(ids: Tensor, experts: int, block_m: int) -> RowTable:
    """Return what the sort has to give, made by torch."""
    flat = ids.flatten().long()
    order = torch.argsort(flat, stable=True)
    order = order[flat[order] >= 0]
    table = allocate_rows(ids, num_experts=experts, block_m=block_m)
    table.row_TK.fill_(-1).view(-1)[order] = torch.arange(len(order), device=ids.device).int()
    counts = torch.bincount(flat[flat >= 0], minlength=experts)
    tiles = (counts + block_m - 1) // block_m
    for out, each in ((table.starts_E1, counts), (table.tiles_E1, tiles)):
        out[0] = 0
        out[1:] = each.cumsum(0)
    owner = torch.arange(experts, device=ids.device).repeat_interleave(tiles)
    table.expert_M.fill_(-1)[: len(owner)] = owner.int()
    return table


def walk(rung: Rung, way: str) -> Iterator[tuple[str, Callable[[], list[str | None]]]]:
    """Yield the stages of a way on one shape; each launches, then compares with torch on its own inputs."""
    weight, variant = WAYS[way]
    library = cuda_fused.FusedLibrary(defines=["ROSE_WATCHDOG"])
    _, arguments = draw(rung.sizes, rung.tokens, weight, seed=1, **rung.options)
    if rung.counts:
        arguments["expert_ids_TK"] = ids_of(rung.counts)
    ids, x, experts = arguments["expert_ids_TK"], arguments["x_TD"], rung.sizes["E"]
    table = table_of(ids, experts, cuda_fused.VARIANTS[variant])
    rows = cuda_fused.FusedLibrary().quantize_rows(x, table)
    steps: dict[str, Callable[[], list[str | None]]]
    if way == "rows":
        steps = row_steps(library, x, ids, experts)
    elif way == "whole":
        steps = {"whole": lambda: whole_step(library, arguments, table, rows)}
    else:
        steps = product_steps(library, arguments, table, rows, way)
    yield from steps.items()


def row_steps(library: FusedLibrary, x: Tensor, ids: Tensor, experts: int) -> dict[str, Any]:
    def sort(block_m: int) -> list[str | None]:
        found = library.sort_by_expert(ids, num_experts=experts, block_m=block_m)
        torch.cuda.synchronize()
        wanted = table_of(ids, experts, block_m)
        tiles = int(wanted.tiles_E1[-1])
        return [
            None if torch.equal(getattr(found, n)[:end], getattr(wanted, n)[:end]) else f"{n} is wrong"
            for n, end in (
                ("row_TK", None), ("starts_E1", None), ("tiles_E1", None), ("expert_M", tiles)
            )
        ]  # fmt: skip

    def quantize() -> list[str | None]:
        table = table_of(ids, experts, 256)
        found = library.quantize_rows(x, table)
        torch.cuda.synchronize()
        wanted = torch.zeros(ids.numel(), x.shape[1], device=x.device)
        is_here = table.row_TK >= 0
        wanted[table.row_TK[is_here].long()] = x.float().repeat_interleave(ids.shape[1], 0)[
            is_here.flatten()
        ]
        count = int(table.starts_E1[-1])
        # One rounding to E4M3.
        return [problem("x", spread(*found, 128)[:count], wanted[:count], 4e-2, 5e-2)]

    return {"sort_256": lambda: sort(256), "sort_128": lambda: sort(128), "quantize": quantize}


def product_steps(
    library: FusedLibrary, arguments: dict[str, Any], table: RowTable, rows: tuple[Tensor, Tensor], way: str
) -> dict[str, Any]:  # fmt: skip
    weight, _ = WAYS[way]
    plain = arguments["weights"]
    up, down_matrix, _ = cuda_fused.matrices(tiled(plain) if weight == "mxfp4" else plain)
    copy = None
    if weight == "mxfp4":
        from rose.kernels.moe_experts.cuda_fused_impl import fp8_copy

        copy = cuda_fused.matrices(fp8_copy(plain))
    alpha, limit = arguments["swiglu_alpha"], arguments["swiglu_limit"]
    starts = table.starts_E1.tolist()
    count = starts[-1]
    kept: dict[str, tuple[Tensor, Tensor]] = {}

    def gate_up() -> list[str | None]:
        options = {"bias_EF": plain.gate_up_bias_EF, "alpha": alpha, "limit": limit}
        kept["hidden"] = library.gate_up(*rows, table, matrix=up, **options)
        torch.cuda.synchronize()
        u_RF = by_expert(spread(*rows, 128)[:count], starts, plain.gate_up, plain.gate_up_bias_EF)
        wanted = swiglu(u_RF, alpha=alpha, limit=limit)
        found = [problem("hidden", spread(*kept["hidden"], 128)[:count], wanted, 4e-2, 5e-2)]
        if copy:
            other = library.gate_up(*rows, table, matrix=copy[0], **options)
            found.append(same_bits("hidden", kept["hidden"][0][:count], other[0][:count]))
            found.append(same_bits("scales", kept["hidden"][1][:, :count], other[1][:, :count]))
        return found

    def down() -> list[str | None]:
        y = library.down(*kept["hidden"], table, matrix=down_matrix, bias_ED=plain.down_bias_ED)
        torch.cuda.synchronize()
        hidden_RI = spread(*kept["hidden"], 128)[:count]
        wanted = by_expert(hidden_RI, starts, plain.down, plain.down_bias_ED)
        found = [problem("y", y[:count], wanted, 4e-3, 8e-3)]
        if copy:
            other = library.down(*kept["hidden"], table, matrix=copy[1], bias_ED=plain.down_bias_ED)
            found.append(same_bits("y", y[:count], other[:count]))
        return found

    return {"gate_up": gate_up, "down": down}


def whole_step(
    library: FusedLibrary, arguments: dict[str, Any], table: RowTable, rows: tuple[Tensor, Tensor]
) -> list[str | None]:
    weights = tiled(arguments["weights"])
    up, down, plain = cuda_fused.matrices(weights)
    options = {"alpha": arguments["swiglu_alpha"], "limit": arguments["swiglu_limit"]}
    hidden = library.gate_up(*rows, table, matrix=up, bias_EF=plain.gate_up_bias_EF, **options)
    y = library.down(*hidden, table, matrix=down, bias_ED=plain.down_bias_ED)
    at = table.row_TK.long()
    picked = y.float()[at.clamp_min(0)].masked_fill((at < 0).unsqueeze(-1), 0)
    wanted = (picked * arguments["expert_weights_TK"].float().unsqueeze(-1)).sum(dim=1)
    out = arguments["out_TD"]
    found = []
    for _ in range(2):
        cuda_fused.run_experts(library, **{**arguments, "weights": weights})
        torch.cuda.synchronize()
        found.append(out.clone())
    repeated = None if torch.equal(*found) else "a second run differs"
    # Quantised by the other kernel: where a scale differs in its last bit, a value may land one E4M3 step away.
    return [problem("out", out, wanted, 2e-2, 4e-2), repeated]


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


def check(way: str, deadline: float, script: str = __file__) -> dict[str, Any]:
    """Check all shapes of a way in as many processes of a script as it takes."""
    began, first, wrong = time.monotonic(), 0, []
    while first < len(RUNGS):
        left = deadline - time.monotonic()
        if left < 8:
            wrong.append(f"no time left for {RUNGS[first].name} and later ones")
            break
        text, ended = child(["--check", way, "--first", str(first)], left, script)
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


def child(options: list[str], seconds: float, script: str = __file__) -> tuple[str, str]:
    """Run a script like this one; return its words and how it ended."""
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"} if "--check" in options else {}
    process = subprocess.Popen(
        [sys.executable, script, *options], env={**os.environ, **blocking}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=seconds)
        return text, f"exit {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0], f"timeout after {seconds:.0f} s"


def time_here(
    ways: list[str], model: str, routings: list[str], tokens: int, stages: list[str]
) -> int:
    """Time the stages of ways on one model's size."""
    registry.load("moe_experts")
    sizes = SIZES[model]
    drawn = draw({**sizes, "I": 32}, tokens, "mxfp4", seed=2)[1]
    ids = {
        "random": drawn["expert_ids_TK"],
        "balanced": balanced_ids(tokens, sizes["E"], sizes["K"]),
    }
    prepared: dict[str, Any] = {}
    for way in ways:
        weight, variant = WAYS[way]
        if weight not in prepared:
            made = draw(sizes, 1, weight, seed=1)[1]["weights"]
            prepared[weight] = tiled(made) if weight == "mxfp4" else made
        for routing in routings:
            arguments = {**drawn, "weights": prepared[weight], "expert_ids_TK": ids[routing]}
            if way == "rows":
                calls = row_stages(arguments, sizes["E"])
            else:
                calls = stages_of(arguments, cuda_fused.VARIANTS[variant])
            for stage, call in calls.items():
                if way not in PRODUCTS or not stages or stage in stages:
                    say(**timed(call, stage, way=way, model=model, tokens=tokens, routing=routing))
    return 0


def timed(call: Callable[[], Any], stage: str, **labels: Any) -> dict[str, Any]:
    median, least = time_us(call, replays=5)
    line = {"bench": "moe_prefill_fused", **labels, "stage": stage}
    line |= {"median_us": round(median, 1), "min_us": round(least, 1)}
    sizes = SIZES[labels["model"]]
    flops = 2 * labels["tokens"] * sizes["K"] * sizes["D"] * sizes["I"]
    work = {"gate_up": 2 * flops, "down": flops, "whole": 3 * flops}
    if stage in work:
        line["tflops"] = round(work[stage] / median / 1e6, 1)
    return line


def stages_of(arguments: dict[str, Any], block_m: int) -> dict[str, Callable[[], Any]]:
    """Return each product as a closure over rows that the bound kernels made, and the whole."""
    library = cuda_fused.FusedLibrary()
    up, down_matrix, plain = cuda_fused.matrices(arguments["weights"])
    table = table_of(arguments["expert_ids_TK"], up.shape[0], block_m)
    rows = cuda_fused.FusedLibrary().quantize_rows(arguments["x_TD"], table)

    def gate_up() -> tuple[Tensor, Tensor]:
        return library.gate_up(
            *rows,
            table,
            matrix=up,
            bias_EF=plain.gate_up_bias_EF,
            alpha=1.702,
            limit=7.0,
        )

    hidden = gate_up()
    return {
        "gate_up": gate_up,
        "down": lambda: library.down(
            *hidden, table, matrix=down_matrix, bias_ED=plain.down_bias_ED
        ),
        "whole": lambda: cuda_fused.run_experts(library, **arguments, block_m=block_m),
    }


def row_stages(arguments: dict[str, Any], experts: int) -> dict[str, Callable[[], Any]]:
    library = cuda_fused.FusedLibrary()
    ids, x = arguments["expert_ids_TK"], arguments["x_TD"]
    table = table_of(ids, experts, 256)
    return {
        "sort": lambda: library.sort_by_expert(ids, num_experts=experts, block_m=256),
        "quantize": lambda: library.quantize_rows(x, table),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", default="", choices=["", *WAYS], help="check this way here")
    parser.add_argument("--first", type=int, default=0, help="with --check: shape to begin with")
    parser.add_argument(
        "--time", nargs="+", default=[], choices=list(WAYS), help="time these ways here"
    )
    parser.add_argument("--model", default="20b", choices=list(SIZES))
    parser.add_argument("--routing", nargs="+", default=["balanced", "random"])
    parser.add_argument("--stages", nargs="*", default=[], help="with --time: only these")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--seconds", type=float, default=115.0, help="for everything")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.check:
        return check_here(arguments.check, arguments.first)
    if arguments.time:
        return time_here(
            arguments.time, arguments.model, arguments.routing, arguments.tokens, arguments.stages
        )
    began = time.monotonic()
    builds = [cuda_fused.FusedLibrary(defines=d).library for d in ([], ["ROSE_WATCHDOG"])]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda library: library.build(), builds))
    say(stage="built", seconds=round(time.monotonic() - began, 1))
    with ThreadPoolExecutor(len(WAYS)) as pool:
        outcomes = list(pool.map(lambda way: check(way, began + arguments.seconds * 0.6), WAYS))
    for outcome in outcomes:
        say(bench="moe_prefill_fused_check", **outcome)
    good = [o["way"] for o in outcomes if o["ok"]]
    # Without a right sort and quantisation only the products can be timed.
    stages = [] if "rows" in good and "whole" in good else ["gate_up", "down"]
    for model in [] if arguments.check_only else ("120b", "20b"):
        packed = [way for way, (weight, _) in PRODUCTS.items() if weight == "mxfp4"]
        wanted = packed if model == "120b" else ["rows", *PRODUCTS]
        ways = [way for way in wanted if way in good]
        left = began + arguments.seconds - time.monotonic()
        options = ["--time", *ways, "--model", model, "--tokens", str(arguments.tokens)]
        text, ended = child([*options, "--stages", *stages], max(left, 5.0))
        lines = [line for line in text.splitlines() if line.startswith("{")]
        print("\n".join(lines), flush=True)
        if ended != "exit 0":
            say(model=model, ended=ended, words=text.splitlines()[-2:])
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
