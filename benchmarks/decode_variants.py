"""Time launch shapes of the decode kernels on a GPU: checks first, then CUDA graphs over rotated weights.

    PYTHONPATH=src python benchmarks/decode_variants.py [--ops moe gemm route sample] [--batches 1 8 32]
        [--models 20b 120b] [--out FILE.jsonl] [--quick] [--seconds 110]

Needs torch, triton and numpy. One JSON line per measurement; a table of the best comes last. Each operation
runs in processes of its own, so that one that kills the CUDA context leaves the others alone; checks run
beside the compilation, timing alone. What --seconds leaves no time for is counted and left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rose.kernels import draw, registry
from rose.kernels.cases import compare
from rose.kernels.check import cases_module, check_case
from rose.kernels.moe_experts.reference import reference as experts_reference
from rose.kernels.weights import ExpertWeights, LinearWeights
from rose.utils.device import detect

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128)
EXPERTS = {"20b": 32, "120b": 128}
D = INNER = 2880
K = 4
Call = Callable[[int], None]


class Recorder:
    """Writes lines and keeps the best; a shard only compiles its share of the variants."""

    def __init__(
        self, path: Path | None, shard: tuple[int, int] | None, deadline: float = math.inf
    ) -> None:
        self.path, self.lines, self.shard, self.seen = path, [], shard, 0
        self.deadline, self.late = deadline, 0

    def is_skipped(self) -> bool:
        """Tell whether the next variant belongs to another shard, or time is up."""
        self.seen += 1
        if time.time() > self.deadline:
            self.late += 1
            return True
        return self.shard is not None and self.seen % self.shard[1] != self.shard[0]

    def add(self, **line: Any) -> None:
        if self.shard is not None:
            return
        self.lines.append(line)
        text = json.dumps(line)
        if self.path:
            with self.path.open("a") as file:
                file.write(text + "\n")
        if "error" in line:
            print(text, flush=True)

    def table(self, keep: int) -> None:
        print("\nop batch: us  TB/s  config (best first)")
        groups: dict[tuple, list[dict]] = {}
        for line in self.lines:
            if "us" in line:
                groups.setdefault((line["op"], line["batch"]), []).append(line)
        for (op, batch), lines in groups.items():
            lines.sort(key=lambda line: line["us"])
            for line in lines[:keep]:
                rate = f"{line['tb_per_s']:5.2f}"
                print(f"{op:18} {batch:4}: {line['us']:8.2f} {rate}  {line['config']}", flush=True)


def time_call(call: Call, copies: int, *, calls: int = 24, replays: int = 9) -> float:
    """Return the median of microseconds per call over graph replays; `call(i)` uses copy i % copies."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % copies)
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples = []
    for _ in range(replays):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(samples)


def short(shape: Any) -> str:
    """Write a launch shape with what differs from its defaults."""
    if not dataclasses.is_dataclass(shape):
        return str(shape)
    parts = []
    for field in dataclasses.fields(shape):
        value = getattr(shape, field.name)
        if value != field.default:
            parts.append(f"{field.name}={short(value)}")
    return f"({' '.join(parts)})"


DECODE = {
    "moe_experts": ("cuda_decode", "gluon_decode"),
    "gemm": ("gluon_decode", "triton", "torch_cublas"),
    "moe_route": ("cuda_decode", "triton"),
    "sample": ("triton",),
}
"""The implementations checked and timed here; others have scripts of their own."""


def registered(name: str) -> list[registry.Implementation]:
    registry.load(name)
    return [i for i in registry.implementations(name) if i.name in DECODE[name]]


def check_registered(name: str) -> bool:
    """Run the decode implementations of one operation over its cases."""
    device, ok, count = detect("cuda"), True, 0
    operation = registry.load(name)
    for implementation in registered(name):
        for case in cases_module(name).CASES:
            if case.rows > 512 or case.sizes.get("E", 0) * case.sizes.get("D", 0) > 64 * 2880:
                continue
            try:
                outcome = check_case(operation, implementation, case, device, 5)
            except Exception as error:  # noqa: BLE001
                traceback.print_exc(limit=-2)
                print(f"CHECK {name}/{implementation.name} {case.name}: {error!r}"[:600])
                ok = False
                continue
            count += outcome.status == "ok"
            if outcome.status == "failed":
                ok = False
                print(f"CHECK failed {name}/{implementation.name} {case.name}: {outcome.detail}")
    print(f"CHECK {name}: {count} right{'' if ok else ', others not'}", flush=True)
    return ok


# Experts


def expert_layers(experts: int, weight: str = "mxfp4", device: str = "cuda") -> list[ExpertWeights]:
    source = draw.generator(device, 1)

    def layer() -> ExpertWeights:
        return ExpertWeights(
            gate_up=draw.matrix(weight, experts, 2 * INNER, D, source=source),
            gate_up_bias_EF=draw.normal(experts, 2 * INNER, source=source, dtype="bf16", scale=0.3),
            down=draw.matrix(weight, experts, D, INNER, source=source),
            down_bias_ED=draw.normal(experts, D, source=source, dtype="bf16", scale=0.3),
        )

    return [layer() for _ in range(2)]


def gluon_shapes(batch: int, experts: int, impl: Any) -> list[Any]:
    """Return few launch shapes of the Gluon kernels: the chosen one and its nearest rivals."""
    shapes: list[Any] = [impl.choose(batch, {"D": D, "I": INNER, "E": experts, "K": K})]
    if batch <= 4:
        up, down = impl.Tile(splits=4, max_registers=128), impl.Tile(splits=2, stages=4)
        shapes.append(
            impl.Launch(mode=impl.BY_PAIR, up=up, down=down, is_fused=True, is_dependent=True)
        )
    elif batch >= 16:
        both = impl.Tile(splits=2, warps_m=2, max_registers=128)
        shapes.append(impl.Launch(mode=impl.SORTED, tokens=16, up=both, down=both))
    return shapes


def cuda_shapes(batch: int, experts: int, impl: Any, *, is_fp8: bool = False) -> list[Any]:
    """Return the launch shapes of the CUDA kernel that fit, the chosen one first."""
    sizes = {"D": D, "I": INNER, "E": experts, "K": K}
    shapes = [impl.choose(batch, sizes, is_fp8=is_fp8)]
    shapes.append(dataclasses.replace(shapes[0], is_dependent=False))
    for width, warps, blocks, stages in itertools.product((8, 16), (8, 12), (1, 2), (7, 4, 3)):
        if (width == 16 and batch <= 8) or (is_fp8 and warps != 8):
            continue
        wanted = impl.Launch(width=width, warps=warps, blocks_per_sm=blocks, stages=stages)
        found = impl.fitted(wanted, batch, sizes, is_fp8=is_fp8)
        if found is not None and found not in shapes:
            shapes.append(found)
    return shapes


def bench_moe(args: argparse.Namespace, out: Recorder) -> None:
    registry.load("moe_experts")
    gluon = importlib.import_module("rose.kernels.moe_experts.gluon_decode_impl")
    cuda = importlib.import_module("rose.kernels.moe_experts.cuda_decode_impl")
    for model, weight in itertools.product(args.models, args.weights):
        experts, is_fp8 = EXPERTS[model], weight == "fp8_block"
        if is_fp8 and model == "120b":
            continue
        layers = expert_layers(experts, weight)
        expert_bytes = (layers[0].gate_up.num_bytes + layers[0].down.num_bytes) // experts
        up_bytes = layers[0].gate_up.num_bytes // experts
        for batch in args.batches:
            calls, hit = moe_calls(batch, experts, layers)
            wanted = {**calls[0], "out_TD": torch.empty(batch, D, device="cuda")}
            if out.shard is None:
                experts_reference(**wanted)
            case = cases_module("moe_experts").make_case("x", batch, {"D": D})
            tolerance = cases_module("moe_experts").tolerance(case)
            variants: list[Any] = [
                (cuda.EXPERTS, s) for s in cuda_shapes(batch, experts, cuda, is_fp8=is_fp8)
            ]
            if out.shard is not None:
                variants = []  # nvcc has compiled; only Triton's kernels need it
            if not is_fp8:
                variants += [(gluon, s) for s in gluon_shapes(batch, experts, gluon)]
            for impl, shape in variants[:3] if args.quick else variants:
                name = "gluon" if impl is gluon else "cuda"
                tag = "_fp8" if is_fp8 else ""
                line = {"op": f"moe_{model}{tag}", "batch": batch}
                line["config"] = f"{name} {short(shape)}"
                if out.is_skipped():
                    continue
                try:
                    calls[0]["out_TD"].fill_(float("nan"))
                    impl.launch(shape, **calls[0])
                    if out.shard is not None:
                        continue
                    wrong = compare("out", calls[0]["out_TD"], wanted["out_TD"], tolerance)
                    if wrong is not None:
                        out.add(**line, error=f"wrong: {wrong}")
                        continue
                    us = time_call(
                        lambda i, s=shape, a=calls, m=impl: m.launch(s, **a[i]), len(calls)
                    )
                    out.add(**line, us=us, tb_per_s=hit * expert_bytes / us / 1e6, distinct=hit)
                    if impl is not gluon:
                        time_parts(impl, shape, calls, line, out, hit, up_bytes, expert_bytes)
                except Exception as error:  # noqa: BLE001
                    out.add(**line, error=repr(error)[:300])
        del layers
        torch.cuda.empty_cache()


def moe_calls(
    batch: int, experts: int, layers: list[ExpertWeights], device: str = "cuda"
) -> tuple[list[dict[str, Any]], float]:
    """Return calls over different experts of different layers, and how many experts each hits on average."""
    source = draw.generator(device, batch)
    ids = [draw.routing(batch, experts, K, source=source) for _ in range(8)]
    calls = [
        {
            "x_TD": draw.normal(batch, D, source=source, dtype="bf16", scale=1.5),
            "expert_ids_TK": i,
            "expert_weights_TK": draw.normal(batch, K, source=source).softmax(-1).bfloat16(),
            "weights": layers[n % len(layers)],
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "out_TD": torch.empty(batch, D, dtype=torch.bfloat16, device=device),
        }
        for n, i in enumerate(ids)
    ]
    return calls, statistics.mean(float(i.unique().numel()) for i in ids)


def time_parts(
    impl: Any, shape: Any, calls: list[dict[str, Any]], line: dict[str, Any], out: Recorder,
    hit: float, up_bytes: int, expert_bytes: int,
) -> None:  # fmt: skip
    """Time gate_up and down of the CUDA kernel alone."""
    num_pairs = calls[0]["expert_ids_TK"].numel()
    act = torch.randn(num_pairs, INNER, device="cuda").bfloat16()
    y = torch.empty(num_pairs, D, device="cuda")

    def up(i: int) -> None:
        c = calls[i]
        impl.gate_up(
            shape, c["x_TD"], c["expert_ids_TK"], c["weights"], act, alpha=1.702, limit=7.0
        )

    def down(i: int) -> None:
        c = calls[i]
        impl.down(shape, act, c["expert_ids_TK"], c["weights"], y)

    for name, part, size in (("up", up, up_bytes), ("down", down, expert_bytes - up_bytes)):
        us = time_call(part, len(calls))
        out.add(
            op=f"{line['op']}_{name}", batch=line["batch"], config=line["config"], us=us,
            tb_per_s=hit * size / us / 1e6,
        )  # fmt: skip


# Projections


def gemm_variants(batch: int, name: str, quick: bool) -> list[tuple[str, Callable[..., None]]]:
    registry.load("gemm")
    gluon = importlib.import_module("rose.kernels.gemm.gluon_decode_impl")
    tri = importlib.import_module("rose.kernels.gemm.triton_impl")
    variants: list[tuple[str, Callable[..., None]]] = []

    def add(label: str, module: Any, shape: Any) -> None:
        variants.append(
            (f"{label} {short(shape)}", lambda s=shape, m=module, **a: m.launch(s, **a))
        )

    tokens = 8 if batch <= 8 else 16 if batch <= 16 else 32
    if batch <= 64:
        shapes = [
            (16, 4, 1, 2, 4),
            (16, 4, 1, 2, 6),
            (16, 8, 1, 2, 3),
            (16, 8, 1, 2, 4),
            (16, 8, 1, 1, 6),
            (16, 2, 1, 2, 6),
            (32, 4, 1, 2, 3),
            (32, 8, 1, 2, 2),
            (32, 8, 1, 1, 4),
        ]
        if name == "head":
            shapes += [
                (32, 2, 2, 2, 4),
                (32, 1, 2, 2, 6),
                (64, 1, 4, 2, 6),
                (64, 2, 4, 2, 4),
                (128, 1, 4, 2, 3),
                (64, 2, 2, 2, 3),
            ]
        for rows, parts, warps_m, units, stages in shapes:
            shape = gluon.Launch(
                rows=rows, parts=parts, warps_m=warps_m, tokens=tokens, units=units, stages=stages
            )
            add("gluon", gluon, shape)
            if (rows, parts, stages) in ((16, 4, 4), (16, 8, 3), (32, 2, 4)):
                add("gluon", gluon, dataclasses.replace(shape, is_dependent=True))
    bt = min(128, max(16, 1 << (batch - 1).bit_length()))
    for rows, columns, splits, swapped, warps, stages in [
        (32, 128, 1, False, 4, 6), (32, 128, 1, False, 4, 4), (32, 128, 2, False, 4, 5), (32, 256, 1, False, 4, 4),
        (16, 256, 1, False, 4, 5), (64, 128, 1, True, 4, 5), (64, 128, 2, True, 4, 4), (64, 128, 3, True, 4, 4),
        (128, 64, 1, True, 4, 5), (128, 64, 1, True, 8, 5), (128, 64, 2, True, 4, 4), (128, 128, 1, True, 8, 3),
        (256, 64, 1, True, 8, 4),
    ]:  # fmt: skip
        smem = (rows + bt) * columns * 2 * stages
        if smem > 220_000 or (name == "head" and splits > 1):
            continue
        shape = tri.Launch(
            tokens=bt, rows=rows, columns=columns, splits=splits, is_swapped=swapped,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        add("triton", tri, shape)
        if swapped and stages == 5 and warps == 4:
            add("triton", tri, dataclasses.replace(shape, is_dependent=True))

    def cublas(x_TK: Any, *, weights: Any, residual_TN: Any, out_TN: Any) -> None:
        if out_TN.dtype == torch.float32:
            torch.mm(x_TK, weights.matrix.values.T, out_dtype=torch.float32, out=out_TN)
        elif residual_TN is not None:
            torch.addmm(residual_TN + weights.bias_N, x_TK, weights.matrix.values.T, out=out_TN)
        else:
            torch.addmm(weights.bias_N, x_TK, weights.matrix.values.T, out=out_TN)

    variants.append(("cublas (roundings differ)", cublas))
    return variants[::3] if quick else variants


def bench_gemm(args: argparse.Namespace, out: Recorder) -> None:
    cases = cases_module("gemm")
    shapes = {"qkv": (cases.QKV, 8), "out": (cases.OUT, 8), "head": (cases.HEAD, 1)}
    for name, (sizes, copies) in shapes.items():
        source = draw.generator("cuda", 3)
        matrices = [
            draw.matrix("bf16", sizes["N"], sizes["K"], source=source) for _ in range(copies)
        ]
        for batch in args.batches:
            is_head = name == "head"
            kind = torch.float32 if is_head else torch.bfloat16
            calls = [
                {
                    "x_TK": draw.normal(batch, sizes["K"], source=source, dtype="bf16"),
                    "weights": LinearWeights(
                        matrix=m,
                        bias_N=None
                        if is_head
                        else draw.normal(sizes["N"], source=source, dtype="bf16"),
                    ),
                    "residual_TN": draw.normal(batch, sizes["N"], source=source, dtype="bf16")
                    if name == "out"
                    else None,
                    "out_TN": torch.empty(batch, sizes["N"], dtype=kind, device="cuda"),
                }
                for m in matrices
            ]
            first = calls[0]
            wanted = first["x_TK"].float() @ first["weights"].matrix.values.float().T
            for term in (first["weights"].bias_N, first["residual_TN"]):
                if term is not None:
                    wanted += term.float()
            case = cases.make_case("x", batch, sizes, out="float32" if is_head else "bf16")
            size = sizes["N"] * sizes["K"] * 2 + batch * sizes["N"] * first["out_TN"].element_size()
            for label, call in gemm_variants(batch, name, args.quick):
                line = {"op": f"gemm_{name}", "batch": batch, "config": label}
                if out.is_skipped():
                    continue
                try:
                    first["out_TN"].fill_(float("nan"))
                    call(**first)
                    if out.shard is not None:
                        continue
                    wrong = compare("out", first["out_TN"], wanted, cases.tolerance(case))
                    if wrong is not None and "cublas" not in label:
                        out.add(**line, error=f"wrong: {wrong}")
                        continue
                    us = time_call(
                        lambda i, c=call, a=calls: c(**a[i]), copies, calls=4 if is_head else 24
                    )
                    out.add(**line, us=us, tb_per_s=size / us / 1e6)
                except Exception as error:  # noqa: BLE001
                    out.add(**line, error=repr(error)[:300])
        del matrices
        torch.cuda.empty_cache()


# Router and sampling: the registered implementations


def bench_registered(args: argparse.Namespace, out: Recorder, name: str) -> None:
    module = cases_module(name)
    for implementation in registered(name):
        for case in module.CASES:
            if not case.timed or case.rows > 8192 or out.is_skipped():
                continue
            calls = [module.inputs(case, seed, "cuda") for seed in range(4)]
            if implementation.prepare is not None:
                for call in calls:
                    call["weights"] = implementation.prepare(call["weights"])
            line = {"op": f"{name}_{case.name}", "batch": case.rows, "config": implementation.name}
            try:
                us = time_call(lambda i, f=implementation.function, a=calls: f(**a[i]), 4, calls=12)
                out.add(**line, us=us, tb_per_s=module.num_bytes(case) / us / 1e6)
            except Exception as error:  # noqa: BLE001
                out.add(**line, error=repr(error)[:300])


NAMES = {"moe": "moe_experts", "gemm": "gemm", "route": "moe_route", "sample": "sample"}


def time_operations(args: argparse.Namespace) -> None:
    """Time (or, as a shard, compile) the operations in this process."""
    out = Recorder(args.out, tuple(args.shard) if args.shard else None, args.deadline)
    for op in args.ops:
        if op == "moe":
            bench_moe(args, out)
        elif op == "gemm":
            bench_gemm(args, out)
        elif args.shard is None:
            bench_registered(args, out, NAMES[op])
    out.table(args.keep)
    if out.late:
        print(f"{' '.join(args.ops)}: no time left for {out.late} variants", flush=True)


def run_all(args: argparse.Namespace) -> int:
    """Check and compile side by side, then time one operation after the other."""
    begin, argv = time.time(), [a for a in sys.argv[1:] if a != "--no-check"]
    end = begin + args.seconds
    itself = [sys.executable, __file__, *argv]

    def start(*options: Any, is_loud: bool = True) -> subprocess.Popen:
        command = [*itself, *map(str, options)]
        return subprocess.Popen(command, stdout=None if is_loud else subprocess.DEVNULL)

    def finish(process: subprocess.Popen, until: float) -> bool:
        try:
            return process.wait(timeout=max(1.0, until - time.time())) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            return False

    checks = {} if args.no_check else {op: start("--do", "check", "--ops", op) for op in args.ops}
    until = begin + 0.6 * args.seconds
    shards = [
        start("--do", "time", "--deadline", until, "--shard", i, args.processes, is_loud=False)
        for i in range(args.processes)
    ]
    for shard in shards:
        finish(shard, until + 5)
    failed = [op for op, process in checks.items() if not finish(process, until + 5)]
    print(f"checks failed: {' '.join(failed) or 'none'}; {time.time() - begin:.0f} s", flush=True)
    for i, op in enumerate(args.ops):
        now = time.time()
        deadline = now + (end - now) / (len(args.ops) - i) * (1.0 if op != "moe" else 1.5)
        deadline = min(deadline, end)
        if not finish(start("--do", "time", "--ops", op, "--deadline", deadline), deadline + 10):
            failed.append(op)
        print(f"{op} timed after {time.time() - begin:.0f} s", flush=True)
    return 1 if failed else 0


def main() -> int:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--models", nargs="+", default=list(EXPERTS), choices=list(EXPERTS))
    parser.add_argument("--weights", nargs="+", default=["mxfp4"], choices=["mxfp4", "fp8_block"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--keep", type=int, default=4, help="rows of the table per batch")
    parser.add_argument("--processes", type=int, default=14, help="that compile ahead")
    parser.add_argument("--seconds", type=float, default=110, help="for everything")
    parser.add_argument("--shard", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=math.inf, help=argparse.SUPPRESS)
    parser.add_argument("--do", choices=["all", "check", "time"], default="all")
    args = parser.parse_args()
    if args.do == "all":
        return run_all(args)
    if args.do == "check":
        return 0 if all([check_registered(NAMES[op]) for op in args.ops]) else 1
    time_operations(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
