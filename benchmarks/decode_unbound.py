"""Check and time the decode kernels that have not run on a GPU yet, beside those in force.

    PYTHONPATH=src python benchmarks/decode_unbound.py [--ops rows layer 20b 120b] [--batches 1 8 32 128]
        [--out FILE.jsonl] [--seconds 110]

benchmarks/unbound/README.md says what there is and which patches to apply first; decode_variants2.py checks and
times what patches change in place. Sources are compiled side by side, then each operation runs in a process of
its own. One JSON line per measurement or mistake; a table of the best comes last.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from decode_variants import EXPERTS, INNER, D, K, Recorder, expert_layers, time_call
from decode_variants2 import STREAM, WIDE, WIDE_LIBRARY, bench_moe, moe_variants
from torch import Tensor
from unbound import ring, rows

from rose.kernels import draw, registry
from rose.kernels.build import CudaLibrary
from rose.kernels.cases import compare
from rose.kernels.check import cases_module
from rose.kernels.gemm.reference import reference as gemm_reference
from rose.kernels.weights import LinearWeights

for operation in ("gemm", "rms_norm", "attention_decode", "rope_kv_write", "moe_route"):
    registry.load(operation)
GLUON_GEMM: Any = importlib.import_module("rose.kernels.gemm.gluon_decode_impl")
TRITON_GEMM: Any = importlib.import_module("rose.kernels.gemm.triton_impl")
NORM: Any = importlib.import_module("rose.kernels.rms_norm.triton_impl")
ATTENTION: Any = importlib.import_module("rose.kernels.attention_decode.triton_impl")
ROPE: Any = importlib.import_module("rose.kernels.rope_kv_write.triton_impl")
ROUTE: Any = importlib.import_module("rose.kernels.moe_route.cuda_decode_impl")
PATCHED = hasattr(NORM, "launch")
"""Whether dependent_launches.patch is applied."""

Launcher = Callable[..., None]
SHARES = {"rows": 1, "layer": 2, "20b": 3, "120b": 3}
"""Of the time."""


# Experts


class LoadsAlone:
    """The ring kernel without unpacking and products: what its loads take."""

    launchers = (
        ring.LOADS_ALONE.launcher("launch_gate_up_ring", ring.GATE_UP_TYPES),
        ring.LOADS_ALONE.launcher("launch_down_ring", ring.DOWN_TYPES),
    )

    def _call(self, name: str, *args: Any, **kwargs: Any) -> None:
        before = (ring._gate_up, ring._down)
        ring._gate_up, ring._down = self.launchers
        try:
            getattr(ring, name)(*args, **kwargs)
        finally:
            ring._gate_up, ring._down = before

    def launch(self, *args: Any, **kwargs: Any) -> None:
        self._call("launch", *args, **kwargs)

    def gate_up(self, *args: Any, **kwargs: Any) -> None:
        self._call("gate_up", *args, **kwargs)

    def down(self, *args: Any, **kwargs: Any) -> None:
        self._call("down", *args, **kwargs)


def variants(batch: int, experts: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield what is in force, then rings that fit."""
    sizes = {"D": D, "I": INNER, "E": experts, "K": K}
    yield from itertools.islice(moe_variants(batch, experts), 2)
    mean = batch * K / experts
    shapes = [(8, 4, 4), (8, 3, 5)] if mean <= 6 else []
    if mean > 2:
        shapes += [(16, 3, 4), (16, 3, 3), (16, 2, 5), (24, 3, 2), (24, 2, 3), (24, 2, 4)]
    for width, groups, stages in shapes:
        shape = ring.Launch(width=width, groups=groups, stages=stages, is_fused=batch <= 16)
        if ring.fits(shape, batch, sizes):
            yield "ring", ring, shape
            yield "ring, loads alone", LoadsAlone(), shape


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


def _norm(norm: dict[str, Any], out_TD: Tensor, is_dependent: bool) -> None:
    if PATCHED:
        NORM.launch(**norm, out_TD=out_TD, is_dependent=is_dependent)
    else:
        NORM.rms_norm(**norm, out_TD=out_TD)


def _behind_norm(
    product: Launcher, norm: dict[str, Any], calls: list[dict[str, Any]], is_dependent: bool
) -> Callable[[int], None]:
    def both(i: int) -> None:
        _norm(norm, calls[i]["x_TK"], is_dependent)
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
        yield f"rows {tiles}", lambda t=tiles, **a: rows.launch(t, a.pop("x_TK"), **a), True


# A layer: what dependent launches are worth


def bench_layer(args: argparse.Namespace, out: Recorder) -> None:
    """Time one layer of the 20b after another, with and without dependent launches."""
    if not PATCHED:
        print("layer: left out; git apply benchmarks/unbound/dependent_launches.patch first")
        return
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
            for config, is_dependent, tiles in (
                ("as bound", False, 0), ("dependent", True, 0), ("dependent, rows 1", True, 1),
                ("dependent, rows 2", True, 2),
            ):  # fmt: skip
                if time.time() > args.deadline:
                    out.late += 1
                    continue
                if tiles and batch > rows.MAX_TOKENS:
                    continue
                line = {
                    "op": f"layer_{window or 'full'}_{length}",
                    "batch": batch,
                    "config": config,
                }
                try:
                    call = _layer(layers, state, batch, length, window, sizes, is_dependent, tiles)
                    us = time_call(call, 4, calls=12)
                    out.add(**line, us=us, tb_per_s=0.0)
                except Exception as error:  # noqa: BLE001
                    out.add(**line, error=repr(error)[:300])


def _layer(
    layers: list[dict[str, Any]], s: dict[str, Any], batch: int, length: int, window: int | None,
    sizes: dict[str, int], is_dependent: bool, tiles: int,
) -> Callable[[int], None]:  # fmt: skip
    attention = replace(ATTENTION.choose(batch, 8, length, window), is_dependent=is_dependent)
    qkv_shape = replace(TRITON_GEMM.choose(batch, {"N": 5120, "K": D}), is_dependent=is_dependent)

    def run(i: int) -> None:
        layer = layers[i]
        NORM.launch(
            layer["out"]["out_TN"], s["norm"], eps=1e-5, residual_TD=None, out_TD=s["hidden"],
            is_dependent=is_dependent,
        )  # fmt: skip
        qkv = {**layer["qkv"]}
        qkv.pop("x_TK")
        if tiles:
            rows.launch(tiles, s["hidden"], **qkv)
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
        if tiles:
            rows.launch(tiles, attended, **out)
        elif batch <= 16:
            GLUON_GEMM.launch(GLUON_GEMM.choose(batch, {}), attended, **out)
        else:
            shape = replace(
                TRITON_GEMM.choose(batch, {"N": D, "K": 4096}), is_dependent=is_dependent
            )
            TRITON_GEMM.launch(shape, attended, **out)
        NORM.launch(
            out["out_TN"], s["norm"], eps=1e-5, residual_TD=None, out_TD=s["hidden"],
            is_dependent=is_dependent,
        )  # fmt: skip
        ROUTE.launch(
            s["hidden"], weights=layer["router"], expert_ids_TK=s["ids"],
            expert_weights_TK=s["weights"], is_dependent=True,
        )  # fmt: skip
        experts = WIDE if batch > 64 else STREAM
        experts.launch(
            experts.choose(batch, sizes), s["hidden"], s["ids"], s["weights"],
            weights=layer["experts"], swiglu_alpha=1.702, swiglu_limit=7.0,
            out_TD=out["out_TN"],
        )  # fmt: skip

    return run


def libraries(args: argparse.Namespace) -> list[Any]:
    """Return what has to be compiled."""
    found = [rows.LIBRARY, ROUTE.LIBRARY, WIDE.LIBRARY] if {"rows", "layer"} & set(args.ops) else []
    if {"20b", "120b"} & set(args.ops):
        found += [ring.LIBRARY, ring.LOADS_ALONE, WIDE_LIBRARY]
    return [*found, STREAM.LIBRARY]


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
    parser.add_argument("--ops", nargs="+", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=110, help="for everything")
    parser.add_argument("--keep", type=int, default=12, help="rows of the table per batch")
    parser.add_argument("--do", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.do is None:
        return run_all(args)
    out = Recorder(args.out, None)
    if args.do == "rows":
        bench_rows(args, out)
    elif args.do == "layer":
        bench_layer(args, out)
    else:
        bench_moe(args.do, args, out, variants)
    out.table(args.keep)
    if out.late:
        print(f"{args.do}: no time left for {out.late}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
