"""Check and time the decode kernels that are not in force yet, beside those that are.

    PYTHONPATH=src python benchmarks/decode_variants2.py [--ops sample rows layer 20b 120b] [--batches 1 8 32 128]
        [--out FILE.jsonl] [--seconds 105] [--ablation]

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
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from decode_variants import EXPERTS, INNER, D, K, Recorder, _moe_calls, expert_layers, time_call

from rose.kernels import draw, registry
from rose.kernels.build import CudaLibrary
from rose.kernels.cases import compare
from rose.kernels.check import cases_module
from rose.kernels.gemm.reference import reference as gemm_reference
from rose.kernels.moe_experts.reference import reference as experts_reference
from rose.kernels.sample.reference import reference as sample_reference
from rose.kernels.weights import LinearWeights

for operation in (
    "moe_experts", "sample", "gemm", "rms_norm", "attention_decode", "rope_kv_write", "moe_route",
):  # fmt: skip
    registry.load(operation)
STREAM: Any = importlib.import_module("rose.kernels.moe_experts.cuda_decode_impl")
GLUON: Any = importlib.import_module("rose.kernels.moe_experts.gluon_decode_impl")
WIDE: Any = importlib.import_module("rose.kernels.moe_experts.cuda_warpgroup")
ROWS: Any = importlib.import_module("rose.kernels.gemm.cuda_rows")
GLUON_GEMM: Any = importlib.import_module("rose.kernels.gemm.gluon_decode_impl")
TRITON_GEMM: Any = importlib.import_module("rose.kernels.gemm.triton_impl")
NORM: Any = importlib.import_module("rose.kernels.rms_norm.triton_impl")
ATTENTION: Any = importlib.import_module("rose.kernels.attention_decode.triton_impl")
ROPE: Any = importlib.import_module("rose.kernels.rope_kv_write.triton_impl")
ROUTE: Any = importlib.import_module("rose.kernels.moe_route.cuda_decode_impl")
CLUSTER: Any = importlib.import_module("rose.kernels.sample.cuda_cluster")
TRITON_SAMPLE: Any = importlib.import_module("rose.kernels.sample.triton_impl")

FAR = CudaLibrary(WIDE.LIBRARY.source, defines=("ROSE_L2_BYTES=256",))
LEFT_OUT = CudaLibrary(WIDE.RING_LIBRARY.source, defines=("ROSE_LEFT_OUT=2",))
"""Loads alone."""
Launcher = Callable[..., None]
SHARES = {"sample": 2, "rows": 1, "layer": 2, "20b": 3, "120b": 4}
"""Of the time."""


def libraries(args: argparse.Namespace) -> list[CudaLibrary]:
    """Return what has to be compiled."""
    found = [CLUSTER.LIBRARY] if "sample" in args.ops else []
    found += [ROWS.LIBRARY] if {"rows", "layer"} & set(args.ops) else []
    found += [STREAM.LIBRARY, ROUTE.LIBRARY] if "layer" in args.ops else []
    if {"20b", "120b"} & set(args.ops):
        found += [STREAM.LIBRARY, WIDE.LIBRARY, WIDE.RING_LIBRARY, FAR]
        found += [LEFT_OUT] if args.ablation else []
    return found


class Swapped:
    """Gives a module's launchers another library for a while."""

    def __init__(self, module: Any, library: CudaLibrary, names: tuple[str, str]) -> None:
        self.module = module
        self.others = (
            library.launcher(names[0], module.GATE_UP_TYPES),
            library.launcher(names[1], module.DOWN_TYPES),
        )

    def __enter__(self) -> None:
        self.before = (self.module._gate_up, self.module._down)
        self.module._gate_up, self.module._down = self.others

    def __exit__(self, *_: object) -> None:
        self.module._gate_up, self.module._down = self.before


class RingSwapped:
    """The same for the rings of the warpgroup kernel."""

    def __init__(self, library: CudaLibrary) -> None:
        self.others = (
            library.launcher("launch_gate_up_ring", WIDE.RING_GATE_UP_TYPES),
            library.launcher("launch_down_ring", WIDE.RING_DOWN_TYPES),
        )

    def __enter__(self) -> None:
        self.before = (WIDE._gate_up_ring, WIDE._down_ring)
        WIDE._gate_up_ring, WIDE._down_ring = self.others

    def __exit__(self, *_: object) -> None:
        WIDE._gate_up_ring, WIDE._down_ring = self.before


def wide_shapes(batch: int, experts: int) -> Iterator[Any]:
    """Return the launch shapes of the warpgroup kernel worth timing."""
    sizes = {"D": D, "I": INNER, "E": experts, "K": K}
    mean = batch * K / experts
    widths = [8] if mean <= 2 else [8, 16] if mean <= 6 else [16, 24, 32]
    for width in widths:
        for groups in (4, 3):
            shape = WIDE.Launch(width=width, groups=groups)
            if (width > 16 and groups == 4) or not WIDE.fits(shape, batch, sizes):
                continue
            yield shape
    rings = {
        8: ((4, 4), (3, 5)),
        16: ((3, 4), (3, 3), (2, 5)),
        24: ((3, 2), (2, 3), (2, 4)),
        32: (),
    }
    for width in widths:
        for groups, stages in rings[width]:
            shape = WIDE.Launch(width=width, groups=groups, stages=stages)
            if WIDE.fits(shape, batch, sizes):
                yield shape
                if batch <= 16:
                    yield replace(shape, is_fused=True)


def moe_variants(
    batch: int, experts: int, *, ablation: bool
) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield (name, module, launch shape, library to swap in or None), those in force first."""
    sizes = {"D": D, "I": INNER, "E": experts, "K": K}
    yield "stream", STREAM, STREAM.choose(batch, sizes), None
    if batch > 64:
        yield "gluon", GLUON, GLUON.choose(batch, sizes), None
    shapes = list(wide_shapes(batch, experts))
    names = ("launch_gate_up_wide", "launch_down_wide")
    plain = [s for s in shapes if not s.stages and not s.is_fused and not s.fetches]
    for shape in plain:
        yield "wide, 256 bytes into L2", WIDE, shape, Swapped(WIDE, FAR, names)
    for shape in shapes:
        yield "wide", WIDE, shape, None
    if ablation:
        for shape in (s for s in shapes if s.stages):
            yield "wide, loads alone", WIDE, shape, RingSwapped(LEFT_OUT)


def bench_moe(model: str, args: argparse.Namespace, out: Recorder) -> None:
    """Check, then time the experts of one model."""
    experts = EXPERTS[model]
    layers = expert_layers(experts)
    expert_bytes = (layers[0].gate_up.num_bytes + layers[0].down.num_bytes) // experts
    up_bytes = layers[0].gate_up.num_bytes // experts
    cases = cases_module("moe_experts")
    for batch in args.batches:
        calls, hit = _moe_calls(batch, experts, layers)
        wanted = []
        for call in calls[:2]:
            other = {**call, "out_TD": torch.empty(batch, D, device="cuda")}
            experts_reference(**other)
            wanted.append(other["out_TD"])
        tolerance = cases.tolerance(cases._case("x", batch, {"D": D}))
        for name, module, shape, swap in moe_variants(batch, experts, ablation=args.ablation):
            line = {"op": f"moe_{model}", "batch": batch, "config": f"{name} {_short(shape)}"}
            if time.time() > args.deadline:
                out.late += 1
                continue
            try:
                if swap is not None:
                    swap.__enter__()
                wrong = None
                for call, right in zip(calls, wanted, strict=False):
                    call["out_TD"].fill_(float("nan"))
                    module.launch(shape, **call)
                    wrong = wrong or compare("out", call["out_TD"], right, tolerance)
                if wrong is not None and "alone" not in name:
                    out.add(**line, error=f"wrong: {wrong}"[:300])
                    continue
                us = time_call(
                    lambda i, m=module, s=shape, a=calls: m.launch(s, **a[i]), len(calls)
                )
                out.add(**line, us=us, tb_per_s=hit * expert_bytes / us / 1e6, distinct=hit)
                if module is not GLUON:
                    _time_parts(module, shape, calls, line, out, hit, up_bytes, expert_bytes)
            except Exception as error:  # noqa: BLE001
                out.add(**line, error=repr(error)[:300])
            finally:
                if swap is not None:
                    swap.__exit__()
        torch.cuda.empty_cache()


def _short(shape: Any) -> str:
    text = str(shape)
    return text[text.index("(") :]


def _time_parts(
    module: Any, shape: Any, calls: list[dict[str, Any]], line: dict[str, Any], out: Recorder,
    hit: float, up_bytes: int, expert_bytes: int,
) -> None:  # fmt: skip
    """Time gate_up and down alone, without the fused sum."""
    pairs = calls[0]["expert_ids_TK"].numel()
    act, y = (
        torch.randn(pairs, INNER, device="cuda").bfloat16(),
        torch.empty(pairs, D, device="cuda"),
    )

    def up(i: int) -> None:
        c = calls[i]
        module.gate_up(
            shape, c["x_TD"], c["expert_ids_TK"], c["weights"], act, None, alpha=1.702, limit=7.0
        )

    def down(i: int) -> None:
        c = calls[i]
        module.down(
            shape, act, c["expert_ids_TK"], c["expert_weights_TK"], c["weights"], y, None,
            c["out_TD"],
        )  # fmt: skip

    for name, part, size in (("up", up, up_bytes), ("down", down, expert_bytes - up_bytes)):
        us = time_call(part, len(calls))
        out.add(
            op=f"{line['op']}_{name}", batch=line["batch"], config=line["config"], us=us,
            tb_per_s=hit * size / us / 1e6,
        )  # fmt: skip


# Projections of few tokens, alone and behind the norm whose time their weights can load in


def bench_rows(args: argparse.Namespace, out: Recorder) -> None:
    """Check, then time the projections of up to eight tokens."""
    cases = cases_module("gemm")
    for name, sizes in (("qkv", cases.QKV), ("out", cases.OUT)):
        for batch in (b for b in (1, 4, 8) if b <= max(args.batches)):
            calls = [
                cases.inputs(
                    cases._case("x", batch, sizes, residual="apart" if name == "out" else None),
                    seed,
                    "cuda",
                )
                for seed in range(8)
            ]
            norm = {
                "x_TD": torch.randn(batch, sizes["K"], device="cuda").bfloat16(),
                "weight_D": torch.ones(sizes["K"], device="cuda"),
                "eps": 1e-5,
                "residual_TD": None,
            }
            tolerance = cases.tolerance(cases._case("x", batch, sizes))
            wanted = {**calls[0], "out_TN": calls[0]["out_TN"].float()}
            gemm_reference(**wanted)
            size = sizes["N"] * sizes["K"] * 2
            for config, product, is_dependent in _row_variants(name, batch):
                line = {"op": f"gemm_{name}", "batch": batch, "config": config}
                if time.time() > args.deadline:
                    out.late += 1
                    continue
                try:
                    calls[0]["out_TN"].fill_(float("nan"))
                    product(**calls[0])
                    wrong = compare("out", calls[0]["out_TN"], wanted["out_TN"], tolerance)
                    if wrong is not None:
                        out.add(**line, error=f"wrong: {wrong}"[:300])
                        continue
                    us = time_call(lambda i, p=product, a=calls: p(**a[i]), 8)
                    out.add(**line, us=us, tb_per_s=size / us / 1e6)

                    us = time_call(_behind_norm(product, norm, calls, is_dependent), 8)
                    line["op"] = f"norm_{name}"
                    out.add(**line, us=us, tb_per_s=size / us / 1e6)
                except Exception as error:  # noqa: BLE001
                    out.add(**line, error=repr(error)[:300])


def _behind_norm(
    product: Launcher, norm: dict[str, Any], calls: list[dict[str, Any]], is_dependent: bool
) -> Callable[[int], None]:
    def both(i: int) -> None:
        NORM.launch(**norm, out_TD=calls[i]["x_TK"], is_dependent=is_dependent)
        product(**calls[i])

    return both


def _row_variants(name: str, batch: int) -> Iterator[tuple[str, Launcher, bool]]:
    """Yield (name, product, whether the norm before it starts it early)."""
    if name == "qkv":
        yield "triton", TRITON_GEMM.gemm, False
    else:
        yield "gluon", GLUON_GEMM.gemm, False
    yield (
        "gluon behind a dependent norm",
        lambda **a: GLUON_GEMM.launch(GLUON_GEMM.choose(batch, {}), a.pop("x_TK"), **a),
        True,
    )
    for tiles in (1, 2):
        yield f"rows {tiles}", lambda t=tiles, **a: ROWS.launch(t, a.pop("x_TK"), **a), True


# A layer: what dependent launches are worth


def bench_layer(args: argparse.Namespace, out: Recorder) -> None:
    """Time one layer of the 20b after another, with and without dependent launches."""
    gemm_cases = cases_module("gemm")
    experts = expert_layers(EXPERTS["20b"])
    sizes = {"D": D, "I": INNER, "E": EXPERTS["20b"], "K": K}
    for batch, length in ((1, 8192), (8, 8192), (32, 2048), (128, 1024)):
        if batch > max(args.batches):
            continue
        pages = length // 64
        total = batch * pages
        layers = [
            {
                "qkv": gemm_cases.inputs(gemm_cases._case("x", batch, gemm_cases.QKV), i, "cuda"),
                "out": gemm_cases.inputs(
                    gemm_cases._case("x", batch, gemm_cases.OUT, residual="in_place"), i, "cuda"
                ),
                "experts": experts[i % 2],
                "kv": torch.randn(total, 2, 8, 64, 64, device="cuda").bfloat16(),
                "router": LinearWeights(
                    matrix=draw.matrix(
                        "bf16", EXPERTS["20b"], D, source=draw.generator("cuda", 50 + i)
                    ),
                    bias_N=torch.randn(EXPERTS["20b"], device="cuda").bfloat16(),
                ),
            }
            for i in range(4)
        ]
        state = {
            "norm": torch.ones(D, device="cuda"),
            "hidden": torch.empty(batch, D, dtype=torch.bfloat16, device="cuda"),
            "attended": torch.empty(batch, 64, 64, dtype=torch.bfloat16, device="cuda"),
            "ids": torch.empty(batch, K, dtype=torch.int32, device="cuda"),
            "weights": torch.empty(batch, K, dtype=torch.bfloat16, device="cuda"),
            "table": torch.arange(total, device="cuda").int().view(batch, pages),
            "lengths": torch.full((batch,), length, device="cuda").int(),
            "positions": torch.full((batch,), length - 1, device="cuda"),
            "cos_sin": torch.rand(length, 64, device="cuda"),
            "slots": torch.arange(batch, device="cuda") * length + length - 1,
            "sinks": torch.zeros(64, device="cuda"),
        }
        for window in (None, 128):
            for config, is_dependent, rows in (
                ("as bound", False, 0), ("dependent", True, 0), ("dependent, rows 1", True, 1),
                ("dependent, rows 2", True, 2),
            ):  # fmt: skip
                if time.time() > args.deadline:
                    out.late += 1
                    continue
                if rows and batch > ROWS.MAX_TOKENS:
                    continue
                line = {
                    "op": f"layer_{window or 'full'}_{length}",
                    "batch": batch,
                    "config": config,
                }
                try:
                    call = _layer(layers, state, batch, length, window, sizes, is_dependent, rows)
                    us = time_call(call, 4, calls=12)
                    out.add(**line, us=us, tb_per_s=0.0)
                except Exception as error:  # noqa: BLE001
                    out.add(**line, error=repr(error)[:300])


def _layer(
    layers: list[dict[str, Any]], s: dict[str, Any], batch: int, length: int, window: int | None,
    sizes: dict[str, int], is_dependent: bool, rows: int,
) -> Callable[[int], None]:  # fmt: skip
    attention = replace(ATTENTION.choose(batch, 8, length, window), is_dependent=is_dependent)
    qkv_shape = replace(TRITON_GEMM.choose(batch, {"N": 5120, "K": D}), is_dependent=is_dependent)

    def run(i: int) -> None:
        layer = layers[i]
        norm = {"eps": 1e-5, "residual_TD": None, "is_dependent": is_dependent}
        NORM.launch(layer["out"]["out_TN"], s["norm"], out_TD=s["hidden"], **norm)
        qkv = {**layer["qkv"]}
        qkv.pop("x_TK")
        if rows:
            ROWS.launch(rows, s["hidden"], **qkv)
        else:
            TRITON_GEMM.launch(qkv_shape, s["hidden"], **qkv)
        ROPE.launch(
            qkv["out_TN"], s["positions"], s["cos_sin"], s["slots"], kv_pages=layer["kv"],
            is_dependent=is_dependent,
        )  # fmt: skip
        ATTENTION.run(
            qkv["out_TN"][:, :4096].unflatten(1, (64, 64)), layer["kv"], s["table"], s["lengths"],
            s["sinks"], scale=0.125, window_tokens=window, out_SHD=s["attended"], launch=attention,
        )  # fmt: skip
        out = {**layer["out"]}
        out.pop("x_TK")
        attended = s["attended"].view(batch, 4096)
        if rows:
            ROWS.launch(rows, attended, **out)
        elif batch <= 16:
            GLUON_GEMM.launch(GLUON_GEMM.choose(batch, {}), attended, **out)
        else:
            shape = replace(
                TRITON_GEMM.choose(batch, {"N": D, "K": 4096}), is_dependent=is_dependent
            )
            TRITON_GEMM.launch(shape, attended, **out)
        NORM.launch(out["out_TN"], s["norm"], out_TD=s["hidden"], **norm)
        ROUTE.launch(
            s["hidden"], weights=layer["router"], expert_ids_TK=s["ids"],
            expert_weights_TK=s["weights"], is_dependent=True,
        )  # fmt: skip
        STREAM.launch(
            STREAM.choose(batch, sizes), s["hidden"], s["ids"], s["weights"],
            weights=layer["experts"], swiglu_alpha=1.702, swiglu_limit=7.0,
            out_TD=out["out_TN"],
        )  # fmt: skip

    return run


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
        (name, cases._case(name, rows, cases.GPT_OSS_VOCAB, **kind))
        for name, kind in options.items()
    ]


def check_sample(args: argparse.Namespace, out: Recorder) -> None:
    """Hold the draw against the reference: all cases, and every kind at the real vocabulary."""
    module = cases_module("sample")
    rows = mistakes = 0
    wanted = [(c, s) for c in module.CASES for s in (11, 12) if c.rows <= 256 and not c.timed]
    wanted += [(c, s) for _, c in sample_kinds(24) for s in (13, 14)]
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


def run_all(args: argparse.Namespace) -> int:
    """Compile side by side, then run one operation after the other."""
    begin = time.time()
    failed: list[str] = []

    def build(library: CudaLibrary) -> None:
        try:
            library.build()
        except Exception as error:  # noqa: BLE001
            failed.append(f"{library.source.name} {library.flags[-1]}: {str(error)[-800:]}")

    wanted = {library.path(): library for library in libraries(args)}
    threads = [threading.Thread(target=build, args=(x,)) for x in wanted.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"compiled after {time.time() - begin:.0f} s; failed: {failed or 'none'}", flush=True)
    end = begin + args.seconds
    for number, op in enumerate(args.ops):
        left = end - time.time()
        share = left / sum(SHARES[o] for o in args.ops[number:])
        deadline = time.time() + share * SHARES[op]
        command = [sys.executable, __file__, *sys.argv[1:], "--do", op, "--deadline", str(deadline)]
        process = subprocess.Popen(command)
        try:
            process.wait(timeout=max(5.0, deadline + 5 - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            failed.append(f"{op}: killed after its time")
        print(f"{op} done after {time.time() - begin:.0f} s", flush=True)
    print(f"failed: {failed or 'none'}")
    return 1 if failed else 0


def main() -> int:
    """Compile, check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", nargs="+", default=["sample", "rows", "layer", "20b", "120b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=105, help="for everything")
    parser.add_argument("--ablation", action="store_true", help="time the kernel without its parts")
    parser.add_argument("--keep", type=int, default=12, help="rows of the table per batch")
    parser.add_argument("--do", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.do is None:
        return run_all(args)
    out = Recorder(args.out, None)
    if args.do == "sample":
        bench_sample(args, out)
    elif args.do == "rows":
        bench_rows(args, out)
    elif args.do == "layer":
        bench_layer(args, out)
    else:
        bench_moe(args.do, args, out)
    out.table(args.keep)
    if out.late:
        print(f"{args.do}: no time left for {out.late}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
