"""Where the CUDA experts for many tokens go wrong on a GPU: shape by shape, stage by stage, in one minute.

    PYTHONPATH=src python benchmarks/moe_prefill_probe.py

Each shape runs in a process of its own with blocking launches, so that a trap or a hang names its stage and
leaves the others alone. Every stage is compared with what torch makes of that stage's own inputs. The first
shape that fails is run again under compute-sanitizer where that is on PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rose.kernels import registry
from rose.kernels.cases import Case, compare, poison
from rose.kernels.check import cases_module, run_reference
from rose.kernels.formats import MXFP4, FormattedTensor
from rose.kernels.moe_experts.reference import swiglu
from rose.quant.fp8 import from_mxfp4

sys.path.insert(0, str(Path(__file__).parent))
from moe_prefill_variants import balanced_ids, draw

WIDE = {"D": 2880, "I": 2880, "K": 4}


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One shape, drawn as the cases of moe_experts are."""

    name: str
    sizes: dict[str, int]
    tokens: int
    weight: str = "fp8_block"
    implementation: str | None = None
    """A registered implementation as a whole; None: the stages of a variant, or of mxfp4 the expansion."""
    counts: tuple[int, ...] = ()
    """Rows of each expert instead of a drawn routing (K = 1)."""
    options: dict[str, Any] = field(default_factory=dict)


SMALL = {"D": 192, "I": 192, "E": 4, "K": 2}
ONE = {"D": 320, "I": 256, "K": 1}
LADDER = [
    Rung(name="full_tiles", sizes={**ONE, "E": 2}, tokens=512, counts=(256, 256)),
    Rung(name="aligned_short_tile", sizes={**ONE, "E": 2}, tokens=292, counts=(256, 36)),
    Rung(name="few_rows_of_a_tile", sizes={**ONE, "E": 2}, tokens=260, counts=(256, 4)),
    Rung(name="row_1_starts_an_expert", sizes={**ONE, "E": 2}, tokens=129, counts=(1, 128)),
    Rung(name="row_67_starts_an_expert", sizes={**ONE, "E": 3}, tokens=330, counts=(67, 0, 263)),
    *(Rung(name=f"rows_{t}", sizes=SMALL, tokens=t) for t in (1, 63, 64, 65, 129)),
    Rung(name="one_k_block", sizes={"D": 64, "I": 64, "E": 4, "K": 1}, tokens=70),
    Rung(name="empty_experts", sizes={**WIDE, "E": 32}, tokens=300, options={"experts_hit": 5}),
    Rung(name="foreign", sizes={**WIDE, "E": 8}, tokens=700, options={"foreign": True}),
    Rung(name="128_experts", sizes={"D": 320, "I": 256, "E": 128, "K": 4}, tokens=3000),
    Rung(name="20b_balanced_8192", sizes={**WIDE, "E": 32}, tokens=8192),
    Rung(name="20b_random_8192", sizes={**WIDE, "E": 32}, tokens=8192),
    Rung(name="expansion_ragged", sizes={"D": 2880, "I": 320, "E": 3, "K": 4}, tokens=1, weight="mxfp4"),
    Rung(name="expansion_20b", sizes={**WIDE, "E": 32}, tokens=1, weight="mxfp4"),
]  # fmt: skip


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def ids_of(counts: tuple[int, ...]) -> Tensor:
    """Return [T, 1] ids with so many rows for each expert, not in order."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    return ids[order].unsqueeze(1).cuda()


def problem(
    name: str, found: Tensor, wanted: Tensor, relative: float, largest: float
) -> str | None:
    """Compare on the GPU: relative norm, and the largest difference over the largest value."""
    if found.shape != wanted.shape:
        return f"{name}: shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    a, b = found.float(), wanted.float()
    difference = (a - b).abs()
    norm = (difference.norm() / b.norm().clamp_min(1e-30)).item()
    top = (difference.max() / b.abs().max().clamp_min(1e-30)).item()
    if norm <= relative and top <= largest:
        return None
    bad = torch.nonzero(~(difference <= largest * b.abs().max()))
    rows = bad[:, 0].unique().tolist() if len(bad) else []
    columns = bad[:, -1].unique().tolist() if len(bad) else []
    return (
        f"{name}: relative {norm:.2e}, largest {top:.2e}, {len(bad)} bad in {len(rows)} rows "
        f"{rows[:6]}..{rows[-2:]} and {len(columns)} columns {columns[:6]}..{columns[-2:]}"
    )


def spread(values_RC: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return values times their group's scale; scales come as [groups, R or more]."""
    rows, columns = values_RC.shape
    return values_RC.float() * scales[:, :rows].T.repeat_interleave(group, dim=1)[:, :columns]


def by_expert(a_RC: Tensor, starts: list[int], matrix: Any, bias_EN: Tensor) -> Tensor:
    """Return the product of each expert's rows with its matrix, float32."""
    out = a_RC.new_zeros(a_RC.shape[0], bias_EN.shape[1])
    for e, (begin, end) in enumerate(pairwise(starts)):
        if end > begin:
            out[begin:end] = a_RC[begin:end] @ matrix[e].to_float().T + bias_EN[e].float()
    return out


def walk_stages(rung: Rung, shapes: Any, arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (stage, function that returns problems) in order; each function launches, then compares."""
    from rose.kernels.moe_experts import cuda_prefill as prefill

    library = prefill.PrefillLibrary(defines=["ROSE_WATCHDOG"])
    weights, x, ids = arguments["weights"], arguments["x_TD"], arguments["expert_ids_TK"]
    experts, group = weights.gate_up.values.shape[0], shapes.hidden_group
    kept: dict[str, Any] = {}

    def sort() -> list[str | None]:
        table = kept["table"] = library.sort_by_expert(ids, num_experts=experts)
        torch.cuda.synchronize()
        flat = ids.flatten().long()
        order = torch.argsort(flat, stable=True)
        order = order[flat[order] >= 0]
        kept["order"] = order
        wanted = torch.full_like(flat, -1)
        wanted[order] = torch.arange(len(order), device=flat.device)
        counts = torch.bincount(flat[flat >= 0], minlength=experts)
        kept["starts"] = [0, *counts.cumsum(0).tolist()]
        tiles = [0, *((counts + prefill.TILE_ROWS - 1) // prefill.TILE_ROWS).cumsum(0).tolist()]
        return [
            None if torch.equal(table.row_TK.flatten().long(), wanted) else "row_TK is wrong",
            None if table.starts_E1.tolist() == kept["starts"] else f"starts {table.starts_E1.tolist()}",
            None if table.tiles_E1.tolist() == tiles else f"tiles {table.tiles_E1.tolist()}",
        ]  # fmt: skip

    def quantize() -> list[str | None]:
        kept["rows"] = library.quantize_rows(x, kept["table"])
        torch.cuda.synchronize()
        count = kept["starts"][-1]
        found = spread(*kept["rows"], prefill.X_GROUP)[:count]
        # One rounding to E4M3: 2^-4 of a value at most, so 16/448 of the largest; about 2.6e-2 in the norm.
        wanted = x.float()[kept["order"] // ids.shape[1]]
        return [problem("x", found, wanted, 4e-2, 5e-2)]

    def gate_up() -> list[str | None]:
        kept["hidden"] = library.gate_up(
            *kept["rows"], kept["table"], values_EFD=weights.gate_up.values, scales=weights.gate_up.scales,
            bias_EF=weights.gate_up_bias_EF, alpha=arguments["swiglu_alpha"],
            limit=arguments["swiglu_limit"], columns=shapes.gate_up, cluster=shapes.cluster,
        )  # fmt: skip
        torch.cuda.synchronize()
        count = kept["starts"][-1]
        x_RD = spread(*kept["rows"], prefill.X_GROUP)[:count]
        u_RF = by_expert(x_RD, kept["starts"], weights.gate_up, weights.gate_up_bias_EF)
        wanted = swiglu(u_RF, alpha=arguments["swiglu_alpha"], limit=arguments["swiglu_limit"])
        return [problem("hidden", spread(*kept["hidden"], group)[:count], wanted, 4e-2, 5e-2)]

    def down() -> list[str | None]:
        kept["y"] = library.down(
            *kept["hidden"], kept["table"], values_EDI=weights.down.values, scales=weights.down.scales,
            bias_ED=weights.down_bias_ED, group=group, columns=shapes.down, cluster=shapes.cluster,
        )  # fmt: skip
        torch.cuda.synchronize()
        count = kept["starts"][-1]
        hidden_RI = spread(*kept["hidden"], group)[:count]
        wanted = by_expert(hidden_RI, kept["starts"], weights.down, weights.down_bias_ED)
        # The tensor core keeps about 13 bits of its FP8 sums; bf16 rounds to 2^-9.
        return [problem("y", kept["y"][:count], wanted, 4e-3, 8e-3)]

    def combine() -> list[str | None]:
        out = arguments["out_TD"]
        poison(out)
        library.combine(kept["y"], kept["table"], arguments["expert_weights_TK"], out_TD=out)
        torch.cuda.synchronize()
        rows = kept["table"].row_TK.long()
        picked = kept["y"].float()[rows.clamp_min(0)].masked_fill((rows < 0).unsqueeze(-1), 0)
        wanted = (picked * arguments["expert_weights_TK"].float().unsqueeze(-1)).sum(dim=1)
        return [problem("out", out, wanted, 4e-3, 8e-3)]

    yield from ((f.__name__, f) for f in (sort, quantize, gate_up, down, combine))


def walk_whole(rung: Rung, case: Case, arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a registered implementation's prepare and whole call."""
    chosen = {i.name: i for i in registry.implementations("moe_experts")}[rung.implementation]
    prepared: dict[str, Any] = {}

    def prepare() -> list[str | None]:
        prepared["weights"] = chosen.prepare(arguments["weights"])
        torch.cuda.synchronize()
        return []

    def whole() -> list[str | None]:
        rounding = chosen.activation_rounding
        operation, module = registry.load("moe_experts"), cases_module("moe_experts")
        wanted = run_reference(operation, case, arguments, rounding=rounding)["out_TD"]
        poison(arguments["out_TD"])
        chosen.function(**{**arguments, "weights": prepared["weights"]})
        torch.cuda.synchronize()
        tolerance = module.rounded_tolerance(case, rounding)
        difference = compare("out_TD", arguments["out_TD"], wanted, tolerance)
        return [None if difference is None else str(difference)]

    yield from ((f.__name__, f) for f in (prepare, whole))


def first_difference(matrix: FormattedTensor, out: Tensor, scales: Tensor) -> str | None:
    """Compare an expansion with the converter's, byte for byte, and name the first byte that differs."""
    wanted = from_mxfp4(matrix)
    assert wanted.scales is not None, "fp8_block has scales"
    assert matrix.scales is not None, "mxfp4 has scales"
    if not torch.equal(scales, wanted.scales):
        e, row, column = torch.nonzero(scales != wanted.scales)[0].tolist()
        found, other = scales[e, row, column].item(), wanted.scales[e, row, column].item()
        return f"scale of expert {e}, tile {row}, {column}: {found}, wanted {other}"
    found_ENK, wanted_ENK = out.view(torch.uint8), wanted.values.view(torch.uint8)
    if torch.equal(found_ENK, wanted_ENK):
        return None
    bad = torch.nonzero(found_ENK != wanted_ENK)
    e, row, column = bad[0].tolist()
    byte = int(matrix.values[e, row, column // 32, column % 32 // 2])
    return (
        f"{len(bad)} bytes; first of expert {e}, row {row}, column {column}: "
        f"{found_ENK[e, row, column].item():#04x}, wanted {wanted_ENK[e, row, column].item():#04x}; "
        f"code {byte >> column % 2 * 4 & 15:#x}, block exponent {matrix.scales[e, row, column // 32].item() - 127}, "
        f"tile's scale {wanted.scales[e, row // 128, column // 128].item()}"
    )


def walk_expansion(arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the expansion of weights as drawn, then of random bytes with block exponents near and far."""
    from rose.kernels.moe_experts import cuda_prefill as prefill
    from rose.kernels.moe_experts.mxfp4_tiles import multipliers, tile_exponents

    library = prefill.PrefillLibrary()

    def expansion(matrix: FormattedTensor) -> list[str | None]:
        exponents = tile_exponents(matrix)
        out = torch.full((matrix.values.numel() * 2,), 0x7F, dtype=torch.uint8, device="cuda")
        values = library.expand(matrix, exponents, out=out.view(torch.float8_e4m3fn))
        torch.cuda.synchronize()
        return [first_difference(matrix, values, multipliers(exponents))]

    def random(low: int, high: int) -> list[str | None]:
        generator = torch.Generator("cuda").manual_seed(7)
        like = arguments["weights"].gate_up
        drawn = [
            torch.randint(
                bottom, top, part.shape, generator=generator, dtype=torch.uint8, device="cuda"
            )
            for part, bottom, top in ((like.values, 0, 256), (like.scales, low, high))
        ]
        return expansion(FormattedTensor(format=MXFP4, values=drawn[0], scales=drawn[1]))

    yield "gate_up", lambda: expansion(arguments["weights"].gate_up)
    yield "down", lambda: expansion(arguments["weights"].down)
    for low, high in ((113, 128), (127, 142), (90, 150), (20, 230)):
        yield f"exponents_{low - 127}..{high - 128}", lambda low=low, high=high: random(low, high)


def climb(rung: Rung, variant: str) -> int:
    """Run one rung in this process; one line per stage, said before (`begun`) and after it."""
    from rose.kernels.moe_experts import cuda_prefill as prefill

    registry.load("moe_experts")
    case, arguments = draw(rung.sizes, rung.tokens, rung.weight, seed=1, **rung.options)
    if rung.counts:
        arguments["expert_ids_TK"] = ids_of(rung.counts)
    elif "balanced" in rung.name:
        arguments["expert_ids_TK"] = balanced_ids(rung.tokens, rung.sizes["E"], rung.sizes["K"])
    torch.cuda.synchronize()
    if rung.implementation:
        steps = walk_whole(rung, case, arguments)
    elif rung.weight == "mxfp4":
        steps = walk_expansion(arguments)
    else:
        steps = walk_stages(rung, prefill.VARIANTS[variant], arguments)
    for stage, step in steps:
        print(f"begun {stage}", flush=True)
        found = [p for p in step() if p]
        if found:
            print("wrong " + "; ".join(found), flush=True)
    print("finished", flush=True)
    return 0


def child(rung: Rung, variant: str, seconds: float, prefix: list[str]) -> dict[str, Any]:
    """Run one rung in its own process and say how it ended."""
    command = [*prefix, sys.executable, __file__, "--rung", rung.name, "--variant", variant]
    began = time.monotonic()
    process = subprocess.Popen(
        command, env={**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=seconds)
        ended = "ok" if process.returncode == 0 else f"exit {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        ended = f"timeout after {seconds:.0f} s"
    lines = text.splitlines()
    stages = [line.split()[1] for line in lines if line.startswith("begun ")]
    wrong = [line for line in lines if line.startswith(("begun ", "wrong "))]
    wrong = [f"{wrong[i - 1].split()[1]}: {w[6:]}" for i, w in enumerate(wrong) if w[:5] == "wrong"]
    is_ok = ended == "ok" and not wrong and "finished" in lines
    line: dict[str, Any] = {"rung": rung.name, "variant": variant, "ok": is_ok}
    if not is_ok:
        line |= {
            "ended": ended,
            "last_stage": stages[-1] if stages else "before any",
            "wrong": wrong,
        }
        line["words"] = [s for s in lines if "Error" in s][-2:]
        if prefix:
            line["sanitizer"] = [s for s in lines if s.startswith("=====")][:40]
    return {**line, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", default="u256_d256", help="of cuda_prefill.VARIANTS")
    parser.add_argument("--rung", default="", help="run this one here, without a child")
    parser.add_argument(
        "--timeout", type=float, default=20.0, help="seconds a shape may take, start included"
    )
    arguments = parser.parse_args()  # fmt: skip
    if arguments.rung:
        return climb(next(r for r in LADDER if r.name == arguments.rung), arguments.variant)
    from rose.kernels.moe_experts import cuda_prefill as prefill

    began = time.monotonic()
    builds = [prefill.PrefillLibrary(defines=d).library for d in ([], ["ROSE_WATCHDOG"])]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda library: library.build(), builds))
    say(stage="built", seconds=round(time.monotonic() - began, 1))
    with ThreadPoolExecutor(4) as pool:
        outcomes = []
        for outcome in pool.map(
            lambda r: child(r, arguments.variant, arguments.timeout, []), LADDER
        ):
            outcomes.append(outcome)
            say(**outcome)
    failed = [o for o in outcomes if not o["ok"]]
    sanitizer = shutil.which("compute-sanitizer")
    if failed and sanitizer:
        rung = next(r for r in LADDER if r.name == failed[0]["rung"])
        say(**child(rung, arguments.variant, 30, [sanitizer, "--tool", "memcheck"]))
    say(failed=[o["rung"] for o in failed], seconds=round(time.monotonic() - began, 1))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
