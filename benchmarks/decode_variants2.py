"""Check and time the decode kernels that came after decode_variants.py, beside those they replaced.

    PYTHONPATH=src python benchmarks/decode_variants2.py [--ops sample 20b 120b] [--batches 1 8 32 128]
        [--only cluster] [--out FILE.jsonl] [--seconds 105]

Compiles all CUDA sources side by side, then runs each operation in a process of its own: every variant is held
against the reference on fresh inputs with poisoned outputs, then timed as the median of graph replays over
rotated inputs. One JSON line per measurement or mistake; a table of the best comes last.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from decode_variants import (
    EXPERTS,
    INNER,
    D,
    K,
    Recorder,
    expert_layers,
    moe_calls,
    short,
    time_call,
    time_parts,
)

from rose.kernels import registry
from rose.kernels.build import CudaLibrary
from rose.kernels.cases import compare
from rose.kernels.check import cases_module
from rose.kernels.moe_experts.e4m3_weights import with_exponents
from rose.kernels.moe_experts.reference import reference as experts_reference
from rose.kernels.sample.reference import reference as sample_reference

registry.load("moe_experts")
registry.load("sample")
STREAM: Any = importlib.import_module("rose.kernels.moe_experts.cuda_decode_impl")
E4M3: Any = importlib.import_module("rose.kernels.moe_experts.cuda_e4m3_impl")
CLUSTER: Any = importlib.import_module("rose.kernels.sample.cuda_cluster_impl")
TRITON_SAMPLE: Any = importlib.import_module("rose.kernels.sample.triton_impl")


def libraries(args: argparse.Namespace) -> list[CudaLibrary]:
    """Return what has to be compiled."""
    found = [CLUSTER.LIBRARY] if "sample" in args.ops else []
    if {"20b", "120b"} & set(args.ops):
        found += [STREAM.LIBRARY, E4M3.LIBRARY]
    return found


def moe_variants(batch: int, experts: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, what has `launch`, launch shape) of what fits; with few tokens an expert, 8 wide alone."""
    sizes = {"D": D, "I": INNER, "E": experts, "K": K}
    yield "stream", STREAM.EXPERTS, STREAM.choose(batch, sizes)
    for shape in E4M3.SHAPES:
        if E4M3.fits(shape, batch, sizes) and (shape.width == 8 or batch * K / experts > 2):
            yield "e4m3", E4M3.EXPERTS, shape


def bench_moe(model: str, args: argparse.Namespace, out: Recorder) -> None:
    """Check, then time the experts of one model."""
    experts = EXPERTS[model]
    layers = expert_layers(experts)
    expert_bytes = (layers[0].gate_up.num_bytes + layers[0].down.num_bytes) // experts
    up_bytes = layers[0].gate_up.num_bytes // experts
    cases = cases_module("moe_experts")
    for batch in args.batches:
        calls, hit = moe_calls(batch, experts, layers)
        wanted = []
        for call in calls[:2]:
            other = {**call, "out_TD": torch.empty(batch, D, device="cuda")}
            experts_reference(**other)
            wanted.append(other["out_TD"])
        tolerance = cases.tolerance(cases.make_case("x", batch, {"D": D}))
        plain, exponents = calls, [{**c, "weights": with_exponents(c["weights"])} for c in calls]
        for name, module, shape in moe_variants(batch, experts):
            calls = exponents if module is E4M3.EXPERTS else plain
            line = {"op": f"moe_{model}", "batch": batch, "config": f"{name} {short(shape)}"}
            if time.time() > args.deadline:
                out.late += 1
                continue
            try:
                wrong, distance = None, 0.0
                for call, right in zip(calls, wanted, strict=False):
                    call["out_TD"].fill_(float("nan"))
                    module.launch(shape, **call)
                    wrong = wrong or compare("out", call["out_TD"], right, tolerance)
                    apart = (call["out_TD"].float() - right).norm() / right.norm()
                    distance = max(distance, apart.item())
                if wrong is not None:
                    out.add(**line, error=f"wrong: {wrong}"[:300])
                    continue
                us = time_call(
                    lambda i, m=module, s=shape, a=calls: m.launch(s, **a[i]), len(calls)
                )
                rate = hit * expert_bytes / us / 1e6
                out.add(**line, us=us, tb_per_s=rate, distinct=hit, distance=round(distance, 6))
                time_parts(module, shape, calls, line, out, hit, up_bytes, expert_bytes)
            except Exception as error:  # noqa: BLE001
                out.add(**line, error=repr(error)[:300])
        torch.cuda.empty_cache()


# Sampling


def sample_kinds(rows: int) -> list[tuple[str, Any]]:
    """Return cases of the vocabulary of gpt-oss, with what each row filters."""
    cases = cases_module("sample")
    options: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "plain": {},
        "mixed": {"filters": "mixed", "temperature": None},
        "top_k": {"filters": "top_k"},
        "top_p": {"filters": "top_p"},
        "min_p": {"filters": "min_p"},
        "tied": {"filters": "mixed", "is_tied": True},
    }
    return [
        (name, cases.make_case(name, rows, cases.GPT_OSS_VOCAB, **kind))
        for name, kind in options.items()
    ]


def check_sample(args: argparse.Namespace, out: Recorder) -> None:
    """Hold the draw against the reference: every kind at the real vocabulary, and all cases unless told `--only`."""
    module = cases_module("sample")
    rows = mistakes = 0
    wanted = [(c, 13) for _, c in sample_kinds(24)]
    if args.only is None:
        wanted += [(c, 14) for _, c in sample_kinds(24)]
        wanted += [(c, s) for c in module.CASES for s in (11, 12) if c.rows <= 256 and not c.timed]
    for case, seed in wanted:
        if time.time() > args.deadline:
            out.late += 1
            continue
        arguments = module.inputs(case, seed, "cuda")
        right = {**arguments, "tokens_S": torch.empty_like(arguments["tokens_S"])}
        sample_reference(**right)
        for spoiled in (-5, 1 << 40):
            arguments["tokens_S"].fill_(spoiled)
            CLUSTER.sample(**arguments)
            is_wrong_S = arguments["tokens_S"] != right["tokens_S"]
            rows += len(is_wrong_S)
            for row in is_wrong_S.nonzero().flatten().tolist():
                mistakes += 1
                values = {
                    n: arguments[f"{n}_S"][row].item()
                    for n in ("temperature", "top_k", "top_p", "min_p", "tokens")
                }
                out.add(
                    op=f"sample_{case.name}", batch=case.rows, config="cluster",
                    error=f"row {row}: wanted {right['tokens_S'][row].item()}, {values}",
                )  # fmt: skip
    print(f"CHECK sample: {mistakes} of {rows} rows wrong", flush=True)


def bench_sample(args: argparse.Namespace, out: Recorder) -> None:
    """Check, then time sampling."""
    module = cases_module("sample")
    check_sample(args, out)
    for batch in args.batches:
        for name, case in sample_kinds(batch):
            calls = [module.inputs(case, seed, "cuda") for seed in range(4)]
            for config, function in (("cluster", CLUSTER.sample), ("triton", TRITON_SAMPLE.sample)):
                if args.only not in (None, config):
                    continue
                if time.time() > args.deadline:
                    out.late += 1
                    continue
                line = {"op": f"sample_{name}", "batch": batch, "config": config}
                try:
                    us = time_call(lambda i, f=function, a=calls: f(**a[i]), 4, calls=8, replays=5)
                    out.add(**line, us=us, tb_per_s=module.num_bytes(case) / us / 1e6)
                except Exception as error:  # noqa: BLE001
                    out.add(**line, error=repr(error)[:300])
            del calls


def run_all(args: argparse.Namespace, wanted: list[CudaLibrary]) -> int:
    """Compile side by side, then run one operation after the other."""
    begin = time.time()
    failed: list[str] = []

    def build(library: CudaLibrary) -> None:
        try:
            library.build()
        except Exception as error:  # noqa: BLE001
            failed.append(f"{library.source.name} {library.flags[-1]}: {str(error)[-800:]}")

    threads = [threading.Thread(target=build, args=(x,)) for x in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"compiled after {time.time() - begin:.0f} s; failed: {failed or 'none'}", flush=True)
    end = begin + args.seconds
    for number, op in enumerate(args.ops):
        left = end - time.time()
        share = left / sum({"sample": 2, "20b": 3, "120b": 4}[o] for o in args.ops[number:])
        deadline = time.time() + share * {"sample": 2, "20b": 3, "120b": 4}[op]
        command = [sys.executable, __file__, *sys.argv[1:], "--do", op, "--deadline", str(deadline)]
        process = subprocess.Popen(command)
        try:
            if code := process.wait(timeout=max(5.0, deadline + 5 - time.time())):
                failed.append(f"{op}: exit code {code}")
        except subprocess.TimeoutExpired:
            process.kill()
            failed.append(f"{op}: killed after its time")
        print(f"{op} done after {time.time() - begin:.0f} s", flush=True)
    print(f"failed: {failed or 'none'}")
    return 1 if failed else 0


def parse(description: str | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ops", nargs="+", default=["sample", "20b", "120b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=105, help="for everything")
    parser.add_argument("--only", choices=["cluster", "triton"], help="draw that alone")
    parser.add_argument("--keep", type=int, default=12, help="rows of the table per batch")
    parser.add_argument("--do", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Compile, check, time, print."""
    args = parse(__doc__)
    if args.do is None:
        return run_all(args, libraries(args))
    out = Recorder(args.out, None)
    if args.do == "sample":
        bench_sample(args, out)
    else:
        bench_moe(args.do, args, out)
    out.table(args.keep)
    if out.late:
        print(f"{args.do}: no time left for {out.late}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
