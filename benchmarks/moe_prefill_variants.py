"""Experts for many tokens on one GPU: check every variant, then time every stage of it.

Needs torch, triton, nvcc and nothing else:

    PYTHONPATH=src python benchmarks/moe_prefill_variants.py --out results.jsonl

Checks compare with the float32 reference that rounds activations to the same FP8 groups; a variant that fails
is not timed. Times are medians of CUDA graph replays. `--only cuda` or `--only triton_m64` picks variants.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rose.kernels import registry
from rose.kernels.cases import Case, compare, poison
from rose.kernels.check import cases_module, run_reference
from rose.kernels.formats import FORMATS

Stages = dict[str, Callable[[], Any]]
SIZES = {
    "20b": {"D": 2880, "I": 2880, "E": 32, "K": 4},
    "120b": {"D": 2880, "I": 2880, "E": 128, "K": 4},
}
DEEPGEMM_US = {
    ("20b", 8192): (852, 438),
    ("20b", 32768): (3293, 1920),
    ("120b", 8192): (1045, 507),
    ("120b", 32768): (3680, 1927),
}
"""DeepGEMM, grouped contiguous, no bias, no epilogue: gate_up and down, on one H200."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run the operation, stage by stage."""

    name: str
    weight: str
    rounding: tuple[str, str]
    build: Callable[[dict[str, Any]], Stages]
    """Runs all stages once on the arguments; returns each as a closure over what it then read."""
    work: dict[str, str] = field(default_factory=dict)


def triton_variants() -> list[Variant]:
    from rose.kernels.moe_experts import triton_grouped as products
    from rose.kernels.moe_experts import triton_permute as permute
    from rose.kernels.moe_experts import triton_prefill_impl as prefill

    def build(arguments: dict[str, Any], shapes: prefill.PrefillShapes) -> Stages:
        weights, x = arguments["weights"], arguments["x_TD"]
        experts = weights.gate_up.values.shape[0]

        def sort() -> Any:
            return permute.sort_by_expert(
                arguments["expert_ids_TK"], num_experts=experts, block_m=shapes.gate_up.block_m
            )

        def quantize() -> Any:
            return permute.quantize_scatter(x, table, group=prefill.X_GROUP)

        def gate_up() -> Any:
            return products.gate_up(
                *rows,
                table,
                values_EFD=weights.gate_up.values,
                scales=weights.gate_up.scales,
                bias_EF=weights.gate_up_bias_EF,
                alpha=arguments["swiglu_alpha"],
                limit=arguments["swiglu_limit"],
                x_group=prefill.X_GROUP,
                shape=shapes.gate_up,
            )

        def down() -> Any:
            return products.down(
                *hidden,
                table,
                values_EDI=weights.down.values,
                scales=weights.down.scales,
                bias_ED=weights.down_bias_ED,
                a_group=shapes.hidden_group,
                shape=shapes.down,
                dtype=x.dtype,
            )

        def combine() -> None:
            permute.combine(y, table, arguments["expert_weights_TK"], out_TD=arguments["out_TD"])

        def whole() -> None:
            prefill.run_experts(**arguments, shapes=shapes)

        table = sort()
        rows = quantize()
        hidden = gate_up()
        y = down()
        combine()
        return {
            "sort": sort,
            "quantize": quantize,
            "gate_up": gate_up,
            "down": down,
            "combine": combine,
            "whole": whole,
        }

    return [
        Variant(
            name=f"triton_{name}",
            weight="fp8_block",
            rounding=("fp8_group128", f"fp8_group{shapes.hidden_group}"),
            build=lambda arguments, shapes=shapes: build(arguments, shapes),
        )
        for name, shapes in prefill.VARIANTS.items()
    ]


def cuda_variants(*, watchdog: bool) -> list[Variant]:
    from rose.kernels.moe_experts import cuda_prefill as prefill

    library = prefill.PrefillLibrary(defines=["ROSE_WATCHDOG"] if watchdog else [])

    def build(arguments: dict[str, Any], shapes: prefill.PrefillShapes) -> Stages:
        weights, x = arguments["weights"], arguments["x_TD"]
        experts = weights.gate_up.values.shape[0]

        def sort() -> Any:
            return library.sort_by_expert(arguments["expert_ids_TK"], num_experts=experts)

        def quantize() -> Any:
            return library.quantize_rows(x, table)

        def gate_up() -> Any:
            return library.gate_up(
                *rows,
                table,
                values_EFD=weights.gate_up.values,
                scales=weights.gate_up.scales,
                bias_EF=weights.gate_up_bias_EF,
                alpha=arguments["swiglu_alpha"],
                limit=arguments["swiglu_limit"],
                columns=shapes.gate_up,
                cluster=shapes.cluster,
            )

        def down() -> Any:
            return library.down(
                *hidden,
                table,
                values_EDI=weights.down.values,
                scales=weights.down.scales,
                bias_ED=weights.down_bias_ED,
                group=shapes.hidden_group,
                columns=shapes.down,
                cluster=shapes.cluster,
            )

        def combine() -> None:
            library.combine(y, table, arguments["expert_weights_TK"], out_TD=arguments["out_TD"])

        def whole() -> None:
            prefill.run_experts(library, **arguments, shapes=shapes)

        table = sort()
        rows = quantize()
        hidden = gate_up()
        y = down()
        combine()
        return {
            "sort": sort,
            "quantize": quantize,
            "gate_up": gate_up,
            "down": down,
            "combine": combine,
            "whole": whole,
        }

    return [
        Variant(
            name=f"cuda_{name}",
            weight="fp8_block",
            rounding=("fp8_group128", f"fp8_group{shapes.hidden_group}"),
            build=lambda arguments, shapes=shapes: build(arguments, shapes),
        )
        for name, shapes in prefill.VARIANTS.items()
    ]


def draw(
    sizes: dict[str, int],
    tokens: int,
    weight: str,
    *,
    seed: int,
    device: str = "cuda",
    **options: Any,
) -> tuple[Case, dict[str, Any]]:
    """Return a case and its arguments; options that are not given are those of the plain cases."""
    module = cases_module("moe_experts")
    case = Case(
        name="drawn",
        sizes={**sizes, "T": tokens},
        formats={"activation": "bf16", "weight": weight},
        rows=tokens,
        options={**module.CASES[0].options, **options},
    )
    return case, module.inputs(case, seed, device)


CHECKS: list[tuple[str, dict[str, int], int, dict[str, Any]]] = [
    *((f"rows_{t}", {"D": 2880, "I": 2880, "E": 8, "K": 4}, t, {}) for t in (1, 63, 64, 65, 127, 128, 129)),
    ("small_ragged", {"D": 192, "I": 192, "E": 4, "K": 2}, 129, {}),
    ("one_k_block", {"D": 64, "I": 64, "E": 4, "K": 1}, 70, {}),
    ("empty_experts", {"D": 2880, "I": 2880, "E": 32, "K": 4}, 300, {"experts_hit": 5}),
    ("foreign", {"D": 2880, "I": 2880, "E": 16, "K": 4}, 700, {"foreign": True}),
    ("large_values", {"D": 2880, "I": 2880, "E": 8, "K": 4}, 200, {"large_values": True}),
    ("128_experts", {"D": 320, "I": 256, "E": 128, "K": 4}, 3000, {}),
]  # fmt: skip


def check(variant: Variant, seed: int) -> list[str]:
    """Return what is wrong: against the reference, twice the same bits, and rows free of their batch."""
    operation = registry.load("moe_experts")
    module = cases_module("moe_experts")
    problems = []
    for name, sizes, tokens, options in CHECKS:
        case, arguments = draw(sizes, tokens, variant.weight, seed=seed, **options)
        wanted = run_reference(operation, case, arguments, rounding=variant.rounding)["out_TD"]
        poison(arguments["out_TD"])
        stages = variant.build(arguments)
        found = arguments["out_TD"].clone()
        torch.cuda.synchronize()
        tolerance = module.rounded_tolerance(case, variant.rounding)
        difference = compare("out_TD", found, wanted, tolerance)
        if difference is not None:
            problems.append(f"{name}: {difference}")
        poison(arguments["out_TD"])
        stages["whole"]()
        if not torch.equal(found, arguments["out_TD"]):
            problems.append(f"{name}: the whole differs from its stages")
        few = tokens // 2
        if few:
            part = {
                k: v[:few].clone() if k.endswith(("_TD", "_TK")) else v
                for k, v in arguments.items()
            }
            poison(part["out_TD"])
            variant.build(part)
            if not torch.equal(found[:few], part["out_TD"]):
                problems.append(f"{name}: rows depend on the batch")
        torch.cuda.synchronize()
    return problems


def time_us(call: Callable[[], Any], replays: int = 9) -> tuple[float, float]:
    """Return (median, smallest) microseconds of a call inside a replayed graph."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    calls = int(min(max(3000.0 / max(start.elapsed_time(end) * 1e3, 1.0), 1), 50))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    samples = []
    for _ in range(replays):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(samples), min(samples)


def balanced_ids(tokens: int, experts: int, chosen: int) -> torch.Tensor:
    """Return ids that give every expert the same number of rows, in an order that is not sorted."""
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    pairs = order[:, None] * chosen + torch.arange(chosen)[None, :]
    return (pairs % experts).int().cuda()


def measure(
    variant: Variant, model: str, tokens: int, arguments: dict[str, Any], routing: str
) -> Iterator[dict[str, Any]]:
    """Time every stage of a variant on one size."""
    sizes = SIZES[model]
    rows = tokens * sizes["K"]
    flops = {
        "gate_up": 4 * rows * sizes["D"] * sizes["I"],
        "down": 2 * rows * sizes["D"] * sizes["I"],
        "whole": 6 * rows * sizes["D"] * sizes["I"],
    }
    kind = FORMATS["fp8_block"]
    expanded = sizes["E"] * 3 * sizes["D"] * sizes["I"]
    num_bytes = {
        "quantize": rows // sizes["K"] * sizes["D"] * 2 + rows * kind.num_bytes(1, sizes["D"]),
        "combine": (rows + rows // sizes["K"]) * sizes["D"] * 2,
        "expand": expanded + expanded * 17 // 32,
    }
    for stage, call in variant.build(arguments).items():
        median, least = time_us(call)
        line = {
            "bench": "moe_prefill",
            "variant": variant.name,
            "model": model,
            "tokens": tokens,
            "routing": routing,
            "stage": stage,
            "median_us": round(median, 1),
            "min_us": round(least, 1),
        }
        if stage in flops:
            line["tflops"] = round(flops[stage] / median / 1e6, 1)
        if stage in num_bytes:
            line["tb_per_s"] = round(num_bytes[stage] / median / 1e6, 2)
        baseline = DEEPGEMM_US.get((model, tokens))
        if baseline and routing == "balanced" and stage in ("gate_up", "down"):
            line["deepgemm_us"] = baseline[stage == "down"]
        yield line


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of a variant's name")
    parser.add_argument("--models", nargs="+", default=["20b", "120b"], choices=list(SIZES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 16384, 32768])
    parser.add_argument(
        "--routing", nargs="+", default=["balanced", "random"], choices=["balanced", "random"]
    )
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--watchdog", action="store_true", help="CUDA waits of two seconds trap")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    registry.load("moe_experts")
    variants = [*cuda_variants(watchdog=arguments.watchdog), *triton_variants()]
    variants = [v for v in variants if arguments.only in v.name]
    # A trap ends the process's CUDA context: what is most likely to trap comes last.
    variants.sort(key=lambda v: v.name.endswith("_c2"))

    def emit(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    good = []
    for variant in variants:
        if arguments.no_check:
            good.append(variant)
            continue
        began = time.monotonic()
        try:
            problems = check(variant, arguments.seed)
        except Exception as error:  # noqa: BLE001 - one broken variant must not hide the others
            problems = [f"{type(error).__name__}: {error}"]
        emit(
            {
                "bench": "moe_prefill_check",
                "variant": variant.name,
                "seed": arguments.seed,
                "problems": problems,
                "seconds": round(time.monotonic() - began, 1),
            }
        )
        if not problems:
            good.append(variant)
    if arguments.check_only:
        return int(len(good) < len(variants))
    for model in arguments.models:
        for weight in ("fp8_block", "mxfp4"):
            chosen = [v for v in good if v.weight == weight]
            if not chosen:
                continue
            base = draw(SIZES[model], 1, weight, seed=1)[1]
            for tokens in arguments.tokens:
                drawn = draw(
                    {**SIZES[model], "D": 2880, "I": 32, "E": SIZES[model]["E"]},
                    tokens,
                    "mxfp4",
                    seed=2,
                )[1]
                for routing in arguments.routing:
                    ids = drawn["expert_ids_TK"]
                    if routing == "balanced":
                        ids = balanced_ids(tokens, SIZES[model]["E"], SIZES[model]["K"])
                    call = {**drawn, "weights": base["weights"], "expert_ids_TK": ids}
                    for variant in chosen:
                        for line in measure(variant, model, tokens, call, routing):
                            emit(line)
            del base
            torch.cuda.empty_cache()
    return int(len(good) < len(variants))


if __name__ == "__main__":
    sys.exit(main())
