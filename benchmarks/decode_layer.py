"""Time one layer of the 20b after another, and what launching its small kernels dependently is worth.

    PYTHONPATH=src python benchmarks/decode_layer.py [--batches 1 8 32 48 64 128] [--out FILE.jsonl] [--seconds 60]

Kernels and launch shapes are the bound ones; in turn none, one and all of norm, projections, rotary and attention are
launched dependently. The kernels' results are checked elsewhere (`rose.kernels check`); here only that a layer has
the same result however it is launched. One JSON line per measurement; a table of the best comes last.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from decode_variants import EXPERTS, D, K, Recorder, expert_layers, time_call

from rose.kernels import draw, registry
from rose.kernels.check import cases_module
from rose.kernels.moe_experts.e4m3_weights import with_exponents
from rose.kernels.weights import LinearWeights

for operation in ("gemm", "rms_norm", "attention_decode", "rope_kv_write", "moe_route"):
    registry.load(operation)
registry.load("moe_experts")
GLUON_GEMM: Any = importlib.import_module("rose.kernels.gemm.gluon_decode_impl")
TRITON_GEMM: Any = importlib.import_module("rose.kernels.gemm.triton_impl")
TORCH_GEMM: Any = importlib.import_module("rose.kernels.gemm.torch_impl")
NORM: Any = importlib.import_module("rose.kernels.rms_norm.triton_impl")
ATTENTION: Any = importlib.import_module("rose.kernels.attention_decode.triton_impl")
ROPE: Any = importlib.import_module("rose.kernels.rope_kv_write.triton_impl")
ROUTE: Any = importlib.import_module("rose.kernels.moe_route.cuda_decode_impl")
STREAM: Any = importlib.import_module("rose.kernels.moe_experts.cuda_decode_impl")
E4M3: Any = importlib.import_module("rose.kernels.moe_experts.cuda_e4m3_impl")

KINDS = ("norm", "gemm", "rope", "attention")
CONTEXTS = {1: 8192, 8: 8192, 32: 2048, 48: 1024, 64: 1024, 128: 1024}


def inputs(batch: int, length: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return four layers' weights and pages, and what they share."""
    gemm_cases = cases_module("gemm")
    experts = expert_layers(EXPERTS["20b"])
    pages = length // 64
    layers = [
        {
            "qkv": gemm_cases.inputs(gemm_cases.make_case("x", batch, gemm_cases.QKV), i, "cuda"),
            "out": gemm_cases.inputs(
                gemm_cases.make_case("x", batch, gemm_cases.OUT, residual="apart"), i, "cuda"
            ),
            "experts": experts[i % 2],
            "e4m3": with_exponents(experts[i % 2]),
            "kv": torch.randn(batch * pages, 2, 8, 64, 64, device="cuda").bfloat16(),
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
        "x": torch.randn(batch, D, device="cuda").bfloat16(),
        "norm": torch.ones(D, device="cuda"),
        "hidden": torch.empty(batch, D, dtype=torch.bfloat16, device="cuda"),
        "attended": torch.empty(batch, 64, 64, dtype=torch.bfloat16, device="cuda"),
        "ids": torch.empty(batch, K, dtype=torch.int32, device="cuda"),
        "weights": torch.empty(batch, K, dtype=torch.bfloat16, device="cuda"),
        "table": torch.arange(batch * pages, device="cuda").int().view(batch, pages),
        "lengths": torch.full((batch,), length, device="cuda").int(),
        "positions": torch.full((batch,), length - 1, device="cuda"),
        "cos_sin": torch.rand(length, 64, device="cuda"),
        "slots": torch.arange(batch, device="cuda") * length + length - 1,
        "sinks": torch.zeros(64, device="cuda"),
    }
    return layers, state


def layer_call(
    layers: list[dict[str, Any]], s: dict[str, Any], length: int, window: int | None,
    dependent: frozenset[str],
) -> Callable[[int], None]:  # fmt: skip
    """Return what runs layer i; `dependent`: the kinds of kernels launched so."""
    batch = len(s["x"])
    attention = replace(
        ATTENTION.choose(batch, 8, length, window), is_dependent="attention" in dependent
    )

    def triton_gemm(x: torch.Tensor, call: dict[str, Any]) -> None:
        num_rows, num_columns = call["weights"].matrix.values.shape
        shape = TRITON_GEMM.choose(batch, {"N": num_rows, "K": num_columns})
        TRITON_GEMM.launch(replace(shape, is_dependent="gemm" in dependent), x, **call)

    def run(i: int) -> None:
        layer = layers[i]
        NORM.launch(
            s["x"], s["norm"], eps=1e-5, residual_TD=None, out_TD=s["hidden"],
            is_dependent="norm" in dependent,
        )  # fmt: skip
        qkv = {k: v for k, v in layer["qkv"].items() if k != "x_TK"}
        if batch > 16:
            TORCH_GEMM.gemm(s["hidden"], **qkv)
        else:
            triton_gemm(s["hidden"], qkv)
        ROPE.launch(
            qkv["out_TN"], s["positions"], s["cos_sin"], s["slots"], kv_pages=layer["kv"],
            is_dependent="rope" in dependent,
        )  # fmt: skip
        ATTENTION.run(
            qkv["out_TN"][:, :4096].unflatten(1, (64, 64)), layer["kv"], s["table"], s["lengths"],
            s["sinks"], scale=0.125, window_tokens=window, out_SHD=s["attended"], launch=attention,
        )  # fmt: skip
        out = {k: v for k, v in layer["out"].items() if k != "x_TK"}
        attended = s["attended"].view(batch, 4096)
        if batch <= 16:
            GLUON_GEMM.launch(GLUON_GEMM.choose(batch, {}), attended, **out)
        else:
            triton_gemm(attended, out)
        NORM.launch(
            out["out_TN"], s["norm"], eps=1e-5, residual_TD=None, out_TD=s["hidden"],
            is_dependent="norm" in dependent,
        )  # fmt: skip
        ROUTE.moe_route(
            s["hidden"], weights=layer["router"], expert_ids_TK=s["ids"],
            expert_weights_TK=s["weights"],
        )  # fmt: skip
        is_one = batch < E4M3.FEWEST_TOKENS
        experts, weights = (STREAM, layer["experts"]) if is_one else (E4M3, layer["e4m3"])
        experts.moe_experts(
            s["hidden"], s["ids"], s["weights"], weights=weights, swiglu_alpha=1.702,
            swiglu_limit=7.0, out_TD=s["x"],
        )  # fmt: skip

    return run


def bench(args: argparse.Namespace, out: Recorder, deadline: float) -> None:
    """Time each batch, window and way of launching."""
    for batch in args.batches:
        length = CONTEXTS[batch]
        layers, state = inputs(batch, length)
        first = state["x"].clone()
        for window in (None, 128):
            wanted = None
            for kinds in ((), KINDS, *((kind,) for kind in KINDS)):
                line = {
                    "op": f"layer_{window or 'full'}_{length}",
                    "batch": batch,
                    "config": "+".join(kinds) or "none",
                }
                if time.time() > deadline:
                    out.late += 1
                    continue
                try:
                    call = layer_call(layers, state, length, window, frozenset(kinds))
                    state["x"].copy_(first)
                    for i in range(4):
                        call(i)
                    result = state["x"].clone()
                    wanted = result if wanted is None else wanted
                    if not result.equal(wanted) or not result.isfinite().all():
                        out.add(
                            **line, error="the layer's result differs from that of plain launches"
                        )
                        continue
                    out.add(**line, us=time_call(call, 4, calls=12), tb_per_s=0.0)
                except Exception as error:  # noqa: BLE001
                    out.add(**line, error=repr(error)[:300])


def main() -> int:
    """Compile, time, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", nargs="+", type=int, default=list(CONTEXTS), choices=CONTEXTS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    deadline = time.time() + args.seconds
    out = Recorder(args.out, None)
    bench(args, out, deadline)
    out.table(6)
    if out.late:
        print(f"no time left for {out.late}", flush=True)
    return 1 if any("error" in line for line in out.lines) else 0


if __name__ == "__main__":
    sys.exit(main())
