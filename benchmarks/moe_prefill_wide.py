"""The experts with one scale per token (prefill_wide.cuh), bound and not: check them on a GPU, then time them.

    PYTHONPATH=src python benchmarks/moe_prefill_wide.py --out wide.jsonl

Checks as in moe_prefill_fused.py: shape by shape against torch, waits trap after two seconds, a fresh process after a
trap. Every stage is compared on its own inputs; how far it is goes into a line of its own ("..._error"), since what the
tensor core's sums cut off is known by calculation only. The whole operation is compared with the bound one's distance
from the same exact reference. Then the 120b's gate-up, down and whole are timed at 2,048, 8,192 and 32,768 tokens, ways
in turn: the bound kernel, every shape of the new one, the 20b's kernel on an E4M3 copy of the same experts, and what
making such a copy costs. Last, the new kernel is taken apart. About three minutes; a table at the end.
"""

from __future__ import annotations

import argparse
import json
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
from rose.kernels.moe_experts.cuda_fused import FusedLibrary
from rose.kernels.moe_experts.cuda_swapped import SwappedLibrary
from rose.kernels.moe_experts.mxfp4_tiles import tiled
from rose.kernels.moe_experts.reference import reference, swiglu
from rose.kernels.moe_experts.swapped_tables import OffsetExperts, with_offsets

sys.path.insert(0, str(Path(__file__).parent))
import moe_prefill_fused as bound
import moe_prefill_swapped as swapped
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
from unbound import wide

EDGES = (1, 15, 16, 17, 63, 64, 65, 129, 145, 240, 241, 255, 256, 257, 0, 513)
SMALL, LONG = {"D": 192, "I": 192}, {"D": 448, "I": 320}
RUNGS = [
    Rung(name="full_tiles", sizes={**SMALL, "E": 2, "K": 1}, tokens=512, counts=(256, 256)),
    Rung(name="one_token", sizes={**SMALL, "E": 4, "K": 2}, tokens=1),
    Rung(name="few_tokens", sizes={**SMALL, "E": 4, "K": 2}, tokens=65),
    Rung(name="one_half_stage", sizes={"D": 64, "I": 64, "E": 4, "K": 1}, tokens=70),
    Rung(name="edges", sizes={**LONG, "E": len(EDGES), "K": 1}, tokens=sum(EDGES), counts=EDGES),
    Rung(name="128_experts", sizes={**LONG, "E": 128, "K": 4}, tokens=3000),
    Rung(name="empty_experts", sizes={**WIDE, "E": 32}, tokens=300, options={"experts_hit": 5}),
    Rung(name="foreign", sizes={**WIDE, "E": 8}, tokens=700, options={"foreign": True}),
    Rung(name="wide_3000", sizes={**WIDE, "E": 16}, tokens=3000),
]
"""Sizes are 128 k + 64, as the kernel wants them."""
BOUND, COPY = "swapped", "copy"
TOKENS = (8192, 2048, 32768)
_ENDS = """  if constexpr (P::kBf16) store_bf16<P, kN>(total, p, place, end, staged, thread);
  else if constexpr (P::kGateUp) store_hidden<P, kN>(total, p, place, end, staged, thread);
  else store_rows<P, kN>(total, p, place, end, staged, thread);
"""
_NO_END = """  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) sum += total[i];
  if (sum == 1234.5f) const_cast<float*>(p.row_scales)[0] = sum + place.row + staged;
"""
_EXPAND = "  if (has_next) expand<P, 4>(next, at.base + ring.stage * P::kStageBytes, mine, at.base + P::kTable);\n"
_NO_X = [
    ("boxes * kBoxTokens * kBlockK + kCodeBytes", "kCodeBytes"),
    ("for (int b = 0; b < boxes; ++b) {", "for (int b = boxes; b < boxes; ++b) {"),
]
_PAIR = "// SwiGLU of two tokens next to each other"
_SIGMOID = """__device__ __forceinline__ float sigmoid(float half) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(half));
  return 0.5f * y + 0.5f;
}

"""
_WITH_TANH = [
    # alpha2 is -alpha / ln 2.
    ("fast_reciprocal(1.f + fast_exp2(alpha2 * gate))", "sigmoid(-0.34657359f * alpha2 * gate)"),
    (_PAIR, _SIGMOID + _PAIR),
]
WITHOUT = {
    "without_expansion": [(_EXPAND, "")],
    "without_loads_of_tokens": _NO_X,
    "without_ends_of_tiles": [(_ENDS, _NO_END)],
    "products_alone": [(_EXPAND, ""), *_NO_X, (_ENDS, _NO_END)],
    "with_tanh": _WITH_TANH,
}
"""The kernel taken apart: wrong results, but their time says what a part costs.

The last one says what half as many special functions at a tile's end would save: right to 2^-12 of a sigmoid.
"""


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def call_down(
    library: wide.WideLibrary, shape: wide.Shape, weights: OffsetExperts,
    hidden_RI: Tensor, table: Any, short: Any, limit: float,
) -> Callable[[], Tensor]:  # fmt: skip
    """Return the second product as a closure; with `groups` it rounds first and takes tiles of `short`."""
    down, bias_ED = weights.down, weights.weights.down_bias_ED
    if not shape.groups:
        return lambda: library.down(
            hidden_RI, table, matrix=down, bias_ED=bias_ED, limit=limit, shape=shape
        )

    def rounded() -> Tensor:
        values, scales = library.bound.round_in_groups(hidden_RI, table)
        return library.bound.swapped.down(values, scales, short, matrix=down, bias_ED=bias_ED)

    return rounded


def walk(rung: Rung, way: str) -> Iterator[tuple[str, Callable[[], list[str | None]]]]:
    """Yield the stages on one shape; each launches, then compares with torch on its own inputs."""
    shape = wide.SHAPES[way]
    library = wide.WideLibrary(defines=["ROSE_WATCHDOG"])
    _, arguments = draw(rung.sizes, rung.tokens, "mxfp4", seed=1, **rung.options)
    if rung.counts:
        arguments["expert_ids_TK"] = ids_of(rung.counts)
    plain, x, ids = arguments["weights"], arguments["x_TD"], arguments["expert_ids_TK"]
    weights = with_offsets(plain)
    table, short = (
        bound.table_of(ids, rung.sizes["E"], n) for n in (shape.rows, cuda_swapped.ROWS)
    )
    starts = table.starts_E1.tolist()
    count = starts[-1]
    alpha, limit = arguments["swiglu_alpha"], arguments["swiglu_limit"]
    kept: dict[str, Any] = {}

    def say(stage: str, error: float, **more: Any) -> None:
        bound.say(
            bench="moe_prefill_wide_error",
            way=way,
            shape=rung.name,
            stage=stage,
            relative=error,
            **more,
        )

    def quantize() -> list[str | None]:
        kept["x"] = library.bound.quantize_rows(x, table)
        torch.cuda.synchronize()
        values, scales_R = kept["x"]
        kept["spread"] = cuda_swapped.in_order(values)[:count].float() * scales_R[:count, None]
        wanted = torch.zeros(ids.numel(), x.shape[1], device=x.device)
        is_here = table.row_TK >= 0
        rows = x.float().repeat_interleave(ids.shape[1], 0)[is_here.flatten()]
        wanted[table.row_TK[is_here].long()] = rows
        # The largest number of a token becomes 448, so that one rounding is off by 1/28 of it at most.
        return [problem("x", kept["spread"], wanted[:count], 4e-2, 5e-2)]

    def gate_up() -> list[str | None]:
        values, scales_R = kept["x"]
        kept["hidden"] = library.gate_up(
            values, scales_R, table, matrix=weights.gate_up, bias_EF=plain.gate_up_bias_EF,
            alpha=alpha, limit=limit, shape=shape,
        )  # fmt: skip
        torch.cuda.synchronize()
        u_RF = by_expert(kept["spread"], starts, plain.gate_up, plain.gate_up_bias_EF)
        wanted = swiglu(u_RF, alpha=alpha, limit=limit)
        hidden = kept["hidden"][:count]
        unit = wide.hidden_scale(limit)
        found = hidden.float() if shape.groups else cuda_swapped.in_order(hidden).float() * unit
        kept["hidden_RI"] = found
        say("gate_up", distance(found, wanted))
        largest = 1.2e-2 if shape.groups else wide.largest_error(wanted, limit)
        limits = (6e-3 if shape.groups else 4e-2, largest)
        return [problem("hidden", found, wanted, *limits)]

    def down() -> list[str | None]:
        y = call_down(library, shape, weights, kept["hidden"], table, short, limit)()
        torch.cuda.synchronize()
        hidden_RI = kept["hidden_RI"]
        if shape.groups:
            values, scales = library.bound.round_in_groups(kept["hidden"], table)
            hidden_RI = spread(cuda_swapped.in_order(values), scales, 128)[:count]
        wanted = by_expert(hidden_RI, starts, plain.down, plain.down_bias_ED)
        say("down", distance(y[:count], wanted), rounding=distance(wanted.bfloat16(), wanted))
        # Rounding to bf16 is 1.7e-3; by calculation sums that stay in the tensor core add 1 to 2e-3.
        return [problem("y", y[:count], wanted, 6e-3, 1.2e-2)]

    def whole() -> list[str | None]:
        found = []
        for _ in range(2):
            wide.run_experts(library, **{**arguments, "weights": weights}, shape=shape)
            torch.cuda.synchronize()
            found.append(arguments["out_TD"].clone())
        exact = torch.empty_like(arguments["out_TD"], dtype=torch.float32)
        reference(**{**arguments, "out_TD": exact})
        cuda_swapped.run_experts(SwappedLibrary(), **{**arguments, "weights": with_offsets(plain)})
        of_bound = distance(arguments["out_TD"], exact)
        say("whole", distance(found[0], exact), of_bound=of_bound)
        # By calculation 7 % further than with scales of 128 columns; a single token scatters by 20 %.
        far = distance(found[0], exact) > 1.5 * of_bound
        return [
            "whole: further from the exact result than 1.5 of the bound kernel" if far else None,
            None if torch.equal(*found) else "a second run differs",
        ]

    yield from {"quantize": quantize, "gate_up": gate_up, "down": down, "whole": whole}.items()


def check_here(way: str, first: int) -> int:
    """Check from the given shape on, one line per stage."""
    registry.load("moe_experts")
    torch.backends.cuda.matmul.allow_tf32 = False
    for index, rung in enumerate(RUNGS[first:], first):
        for stage, step in walk(rung, way):
            print(f"begun {index} {stage}", flush=True)
            found = [p for p in step() if p]
            if found:
                print(f"wrong {rung.name} {stage}: " + "; ".join(found), flush=True)
    print("finished", flush=True)
    return 0


def stages_of(
    arguments: dict[str, Any], shape: wide.Shape, weights: OffsetExperts, library: wide.WideLibrary
) -> dict[str, Callable[[], Any]]:  # fmt: skip
    """Return each stage as a closure over what the ones before made."""
    plain, x, limit = weights.weights, arguments["x_TD"], arguments["swiglu_limit"]
    ids, experts = arguments["expert_ids_TK"], plain.gate_up.shape[0]
    table, short = (bound.table_of(ids, experts, n) for n in (shape.rows, cuda_swapped.ROWS))
    rows = library.bound.quantize_rows(x, table)

    def gate_up() -> Tensor:
        return library.gate_up(
            *rows, table, matrix=weights.gate_up, bias_EF=plain.gate_up_bias_EF,
            alpha=1.702, limit=limit, shape=shape,
        )  # fmt: skip

    hidden = gate_up()
    return {
        "quantize": lambda: library.bound.quantize_rows(x, table),
        "gate_up": gate_up,
        "down": call_down(library, shape, weights, hidden, table, short, limit),
        "whole": lambda: wide.run_experts(
            library, **{**arguments, "weights": weights}, shape=shape
        ),
    }


def time_here(ways: list[str], tokens: int, routing: str, stages: list[str], rounds: int) -> int:
    """Time stages of ways on the 120b's sizes, ways in turn."""
    registry.load("moe_experts")
    sizes = SIZES["120b"]
    drawn = draw({**sizes, "I": 32}, tokens, "mxfp4", seed=2)[1]
    if routing == "balanced":
        drawn["expert_ids_TK"] = balanced_ids(tokens, sizes["E"], sizes["K"])
    plain = draw(sizes, 1, "mxfp4", seed=1)[1]["weights"]
    prepared = with_offsets(plain)
    calls: dict[str, dict[str, Callable[[], Any]]] = {}
    for way in ways:
        if way == BOUND:
            calls[way] = swapped.stages_of({**drawn, "weights": prepared})
        elif way == COPY:
            weights = draw(sizes, 1, "fp8_block", seed=1)[1]["weights"]
            calls[way] = bound.stages_of({**drawn, "weights": weights}, cuda_fused.VARIANTS["r128"])
            calls[way]["expand"] = expand_call(plain)
        else:
            name, _, part = way.partition(" ")
            shape = wide.SHAPES[name]
            library = library_without(part) if part else wide.WideLibrary()
            given = {**drawn, "weights": plain}
            calls[way] = stages_of(given, shape, prepared, library)
    for turn in range(rounds):
        for stage in stages:
            for way in ways:
                if stage in calls[way]:
                    labels = {"way": way, "model": "120b", "tokens": tokens, "routing": routing}
                    line = bound.timed(calls[way][stage], stage, **labels)
                    bound.say(**{**line, "bench": "moe_prefill_wide", "turn": turn})
    return 0


def expand_call(plain: Any) -> Callable[[], Any]:
    """Return what making E4M3 numbers of a layer's experts in memory takes, for steps so long that it pays."""
    library, tiles = FusedLibrary(), tiled(plain)
    both = ((plain.gate_up, tiles.gate_up_exponents), (plain.down, tiles.down_exponents))
    size = max(e * n * k for e, n, k in (plain.gate_up.shape, plain.down.shape))
    out = torch.empty(size, dtype=torch.float8_e4m3fn, device="cuda")
    return lambda: [library.expand(matrix, exponents, out=out) for matrix, exponents in both]


def library_without(name: str) -> wide.WideLibrary:
    """Return the kernels with a part taken out, from a copy of their sources."""
    folder = default_cache() / "taken_apart_wide" / name
    folder.mkdir(parents=True, exist_ok=True)
    for room, text in sources_without(name).items():
        (folder / room).write_text(text)
    return wide.WideLibrary(CudaLibrary(folder / "wide_sm90.cu"))


def sources_without(name: str) -> dict[str, str]:
    """Return file name -> text of the kernels and all that they include of their folder, a part taken out."""
    kernels = Path(cuda_swapped.__file__).parent
    texts = {path.name: path.read_text() for path in kernels.glob("prefill_*.cuh")}
    texts[wide.SOURCE.name] = wide.SOURCE.read_text().replace(
        "../../src/rose/kernels/moe_experts/", ""
    )
    for old, new in WITHOUT[name]:
        (room,) = (n for n, t in texts.items() if n.startswith("prefill_wide") and old in t)
        assert texts[room].count(old) == 1, old
        texts[room] = texts[room].replace(old, new)
    return texts


def plans(good: list[str], *, is_taken_apart: bool) -> list[list[str]]:
    """Return the options of the processes that time, what matters most first."""
    ways = ["--time", BOUND, *good, COPY]
    made = [[*ways, "--tokens", str(tokens)] for tokens in TOKENS]
    made.append([*ways, "--routing", "balanced", "--stages", "gate_up", "down"])
    if "wide" in good and is_taken_apart:
        made.append(
            ["--time", "wide", *(f"wide {n}" for n in WITHOUT), "--stages", "gate_up", "down"]
        )
    return made


def table(lines: list[dict[str, Any]]) -> str:
    """Return the least median of every way, stage and number of tokens, microseconds and TFLOP/s."""
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for line in lines:
        row = cells.setdefault((line["way"], line["routing"]), {})
        best = row.setdefault(f"{line['tokens']} {line['stage']}", line)
        if line["median_us"] < best["median_us"]:
            row[f"{line['tokens']} {line['stage']}"] = line
    columns = [f"{t} {s}" for t in sorted(TOKENS) for s in ("gate_up", "down", "whole")]
    text = [" | ".join(["way", *columns])]
    for (way, routing), row in cells.items():
        found = [row.get(column) for column in columns]
        numbers = [f"{c['median_us']:.0f} ({c['tflops']:.0f})" if c else "" for c in found]
        text.append(" | ".join([f"{way}, {routing}", *numbers]))
    return "\n".join(text)


def build_all(*, is_taken_apart: bool) -> None:
    made = [wide.WideLibrary(defines=d) for d in ([], ["ROSE_WATCHDOG"])]
    libraries = [each for way in made for each in (way.library, way.bound.library)]
    libraries += [SwappedLibrary().library, FusedLibrary().library]
    if is_taken_apart:
        libraries += [library_without(name).library for name in WITHOUT]
    with ThreadPoolExecutor(len(libraries)) as pool:
        list(pool.map(CudaLibrary.build, libraries))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", default="", choices=["", *wide.SHAPES], help="check it here")
    parser.add_argument("--first", type=int, default=0, help="with --check: shape to begin with")
    parser.add_argument("--time", nargs="+", default=[], help="time these ways here")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--routing", default="random", choices=["random", "balanced"])
    parser.add_argument(
        "--stages", nargs="+", default=["quantize", "gate_up", "down", "whole", "expand"]
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--ways",
        nargs="+",
        default=[*wide.SHAPES],
        choices=[*wide.SHAPES],
        help="check, time these",
    )
    parser.add_argument("--in-one-piece", action="store_true", help="the kernel is not taken apart")
    parser.add_argument("--seconds", type=float, default=240.0, help="for everything")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    if given.check:
        return check_here(given.check, given.first)
    if given.time:
        return time_here(given.time, given.tokens, given.routing, given.stages, given.rounds)
    began = time.monotonic()
    build_all(is_taken_apart=not given.in_one_piece)
    bound.say(stage="built", seconds=round(time.monotonic() - began, 1))
    kept: list[dict[str, Any]] = []

    def keep(lines: list[dict[str, Any]]) -> None:
        """Print and file lines as they come: what was measured stays if time runs out."""
        kept.extend(lines)
        for line in lines:
            bound.say(**line)
        if given.out:
            with given.out.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)

    with ThreadPoolExecutor(len(given.ways)) as pool:
        deadline = began + given.seconds * 0.6
        outcomes = list(pool.map(lambda way: check_way(way, deadline), given.ways))
    for outcome in outcomes:
        keep(outcome.pop("errors"))
        bound.say(bench="moe_prefill_wide_check", **outcome)
    good = [outcome["way"] for outcome in outcomes if outcome["ok"]]
    for options in plans(good, is_taken_apart=not given.in_one_piece):
        left = began + given.seconds - time.monotonic()
        text, ended = bound.child(options, max(left, 5.0), __file__)
        keep([json.loads(line) for line in text.splitlines() if line.startswith("{")])
        if ended != "exit 0":
            bound.say(options=options, ended=ended, words=text.splitlines()[-3:])
    print(table([line for line in kept if "median_us" in line]), flush=True)
    bound.say(seconds=round(time.monotonic() - began, 1), wrong=len(outcomes) - len(good))
    return int(len(good) < len(outcomes))


def check_way(way: str, deadline: float) -> dict[str, Any]:
    """As moe_prefill_fused.check, on this file's shapes; with the lines that say how far each stage is."""
    first, wrong, errors = 0, [], []
    while first < len(RUNGS):
        left = deadline - time.monotonic()
        if left < 8:
            wrong.append(f"no time left for {RUNGS[first].name} and later ones")
            break
        text, ended = bound.child(["--check", way, "--first", str(first)], left, __file__)
        lines = text.splitlines()
        wrong += [line[6:] for line in lines if line.startswith("wrong ")]
        errors += [json.loads(line) for line in lines if line.startswith("{")]
        if "finished" in lines:
            break
        begun = [line.split() for line in lines if line.startswith("begun ")]
        at = int(begun[-1][1]) if begun else first
        stage = begun[-1][2] if begun else "before any stage"
        words = [line for line in lines if "Error" in line][-1:]
        wrong.append(f"{RUNGS[at].name} {stage}: {ended} {words}")
        first = at + 1
    return {"way": way, "ok": not wrong, "wrong": wrong, "errors": errors}


if __name__ == "__main__":
    sys.exit(main())
