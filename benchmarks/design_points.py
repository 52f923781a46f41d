"""What gpt-oss's odd points cost on a GPU: the bias in the accumulators, hidden size 2880, 128,000 tokens.

    PYTHONPATH=src python benchmarks/design_points.py --out FILE.jsonl [--only attention]

- bias: the FP8 products of the experts with the bias seeding the sums, without any bias, and (for down) with the bias
  added by a pass of its own.
- 2880 = 22.5 x 128: the last half stage along K multiplied as half or as a whole of zeros; every kernel at 2880
  beside 2944 (23 x 128) and 3072 (24 x 128), which is what padded copies of the weights would cost.
- attention error: chosen rows near 128,000 tokens of the bound kernels, and the attention inside decode_layers,
  against float64. Where a head is further off than `MOST_OF_A_HEAD` the exit code is 1.
Before and after of one point are timed in turn, three rounds each; the median of the rounds counts. About 60 seconds,
of which the attention takes a few.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rose.kernels import registry
from rose.kernels.cases import Case
from rose.kernels.check import cases_module
from rose.kernels.moe_experts import cuda_fused
from rose.kernels.moe_experts.cuda_fused import FusedLibrary
from rose.kernels.moe_experts.mxfp4_tiles import tiled
from rose.kernels.rope_kv_write.reference import rotate
from rose.utils.device import DeviceFacts, detect

sys.path.insert(0, str(Path(__file__).parent))
from attention_triton_variants import exact_rows, paged
from moe_prefill_inputs import draw, time_us

registry.load("decode_layers")
decode_layers: Any = importlib.import_module("rose.kernels.decode_layers.cuda_impl")
LAYERS: Any = cases_module("decode_layers")
LONGEST = 128000
MOST_OF_A_HEAD = 5e-3
"""Of the relative error of a head's 64 numbers. Rounding weights and result to bf16, all else in float64, makes 3.5e-3
in the worst of 58,000 drawn heads. What is left out of 128,000 tokens makes more in the worst head of a row (each place
tried, on a layer's draw): a page of 64 tokens 2.7e-2 at least, 16 tokens of one kv head, a warp's unit, 7e-3."""
PADDED = (2880, 2944, 3072)
TOKENS = 8192
DEFINES = {"as bound": (), "no bias": ("ROSE_NO_BIAS",), "whole tail": ("ROSE_WHOLE_TAIL",)}
ROUNDS = 3
Calls = dict[str, Callable[[], Any]]


def rounds(point: str, calls: Calls, **labels: Any) -> Iterator[dict[str, Any]]:
    """Time calls in turn; one line for each."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            samples[name].append(time_us(call, replays=5)[0])
    for name, found in samples.items():
        yield {
            "bench": "design_points",
            "point": point,
            "choice": name,
            **labels,
            "median_us": round(statistics.median(found), 2),
            "rounds_us": [round(s, 2) for s in found],
        }


class Products:
    """Both products of the experts over one drawn routing, with one build of the kernels."""

    def __init__(self, weight: str, experts: int, *, hidden: int = 2880) -> None:
        sizes = {"D": hidden, "I": hidden, "E": experts, "K": 4}
        block_m = cuda_fused.VARIANTS["r128" if weight == "fp8_block" else "r256"]
        drawn = draw(sizes, TOKENS, weight, seed=2)[1]
        weights = tiled(drawn["weights"]) if weight == "mxfp4" else drawn["weights"]
        self.up, self.down_matrix, self.plain = cuda_fused.matrices(weights)
        library = FusedLibrary()
        self.table = library.sort_by_expert(
            drawn["expert_ids_TK"], num_experts=experts, block_m=block_m
        )
        self.rows = library.quantize_rows(drawn["x_TD"], self.table)
        self.hidden = self.gate_up(library)
        self.expert_R = self._expert_of_rows()

    def _expert_of_rows(self) -> Tensor:
        counts = self.table.starts_E1.diff()
        return torch.arange(len(counts), device="cuda").repeat_interleave(counts)

    def gate_up(self, library: FusedLibrary) -> tuple[Tensor, Tensor]:
        return library.gate_up(
            *self.rows, self.table, matrix=self.up, bias_EF=self.plain.gate_up_bias_EF,
            alpha=1.702, limit=7.0,
        )  # fmt: skip

    def down(self, library: FusedLibrary) -> Tensor:
        return library.down(
            *self.hidden, self.table, matrix=self.down_matrix, bias_ED=self.plain.down_bias_ED
        )

    def biased_down(self, library: FusedLibrary) -> Tensor:
        """Down without bias, then a pass that reads, adds and writes."""
        y_RD = self.down(library)
        y_RD += self.plain.down_bias_ED.to(y_RD.dtype)[self.expert_R]
        return y_RD


def expert_points() -> Iterator[dict[str, Any]]:
    libraries = {name: FusedLibrary(defines=list(defines)) for name, defines in DEFINES.items()}
    with ThreadPoolExecutor(len(libraries)) as pool:
        list(pool.map(lambda library: library.library.build(), libraries.values()))
    for weight, experts in (("fp8_block", 32), ("mxfp4", 128)):
        labels = {"weight": weight, "experts": experts, "tokens": TOKENS}
        yield from choice_points(Products(weight, experts), libraries, labels)
        torch.cuda.empty_cache()
        yield from padding_points(weight, experts, libraries["as bound"], labels)
        torch.cuda.empty_cache()


def choice_points(
    products: Products, libraries: dict[str, FusedLibrary], labels: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Time both products of each build."""
    bound, bare, whole = (libraries[name] for name in DEFINES)
    count = int(products.table.starts_E1[-1])
    same = torch.equal(products.down(bound)[:count], products.down(whole)[:count])
    assert same, "zeros that are multiplied along change a result"
    gate_up = {name: partial(products.gate_up, library) for name, library in libraries.items()}
    yield from rounds("bias and tail, gate_up", gate_up, **labels)
    down = {
        "as bound": partial(products.down, bound),
        "no bias": partial(products.down, bare),
        "bias in a pass of its own": partial(products.biased_down, bare),
        "whole tail": partial(products.down, whole),
    }
    yield from rounds("bias and tail, down", down, **labels)


def padding_points(
    weight: str, experts: int, library: FusedLibrary, labels: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Time both products at 2880 and at the sizes of padded copies."""
    padded = {str(hidden): Products(weight, experts, hidden=hidden) for hidden in PADDED}
    gate_up = {hidden: partial(each.gate_up, library) for hidden, each in padded.items()}
    yield from rounds("hidden size, gate_up", gate_up, **labels)
    down = {hidden: partial(each.down, library) for hidden, each in padded.items()}
    yield from rounds("hidden size, down", down, **labels)


def call_of(name: str, case: Case, device: DeviceFacts) -> Callable[[], Any]:
    """Return a call of what is bound for a case."""
    regime = registry.Regime(case.phase, case.rows, case.rows)
    bound = registry.bind(
        name, formats=case.formats, sizes=case.sizes, device=device, regimes=(regime,)
    )
    arguments = cases_module(name).inputs(case, 1, device.kind)
    if "weights" in arguments:
        bound.prepare(arguments.pop("weights"))
    function = bound.select(case.phase, case.rows)
    return lambda: function(**arguments)


def layer_points(device: DeviceFacts) -> Iterator[dict[str, Any]]:
    """Norm and projections at 2880 and beside it; small rows stay in L2, which favours none."""
    wanted = (
        ("rms_norm", "decode_1", "D"), ("rms_norm", "prefill_8192", "D"),
        *(("gemm", f"{layer}_{tokens}", "K" if layer == "qkv" else "N")
          for layer in ("qkv", "out") for tokens in (1, 32, 8192)),
    )  # fmt: skip
    for name, case_name, size in wanted:
        case = next(c for c in cases_module(name).CASES if c.name == case_name)
        calls = {
            str(hidden): call_of(name, replace(case, sizes={**case.sizes, size: hidden}), device)
            for hidden in PADDED
        }
        yield from rounds(f"hidden size, {name} {case_name}", calls)


def attention_points(device: DeviceFacts) -> Iterator[dict[str, Any]]:
    """Relative error of chosen rows at 128,000 tokens."""
    length, chunk = LONGEST, 16384
    kv, table, lengths, sinks = paged(1, length, 3)
    sizes = {"H": 64, "G": 8, "D": 64, "L": 64}
    formats = {"activation": "bf16", "kv": "bf16"}
    rows = [0, 1, 127, 128, 5000, 8191, 8192, 16255, 16320, 16383]
    positions = [length - chunk + row for row in rows]
    q_THD = torch.randn(chunk, 64, 64, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, chunk], dtype=torch.int32, device="cuda")
    for window in (None, 128):
        options = {"scale": 0.125, "window_tokens": window}
        for phase, count in (("prefill", chunk), ("decode", 1)):
            name = f"attention_{phase}"
            regime = registry.Regime(phase, count, count)
            bound = registry.bind(
                name, formats=formats, sizes=sizes, device=device, regimes=(regime,)
            )
            out = torch.full((count, 64, 64), float("nan"), device="cuda", dtype=torch.bfloat16)
            if phase == "prefill":
                bound.select(phase, count)(
                    q_THD, kv, table, starts, lengths, sinks, **options, max_query_tokens=chunk, out_THD=out
                )  # fmt: skip
                wanted = exact_rows(q_THD, kv, table[0], length, sinks, rows, positions, window)
                found = out[rows]
            else:
                bound.select(phase, count)(
                    q_THD[-1:], kv, table, lengths, sinks, **options, max_length=length, out_SHD=out
                )
                wanted = exact_rows(
                    q_THD, kv, table[0], length, sinks, [chunk - 1], [length - 1], window
                )
                found = out
            labels = {"op": name, "implementation": next(iter(bound.table.values())).name}
            line = error_line(found, wanted, **labels, tokens=length, window=window)
            yield {**line, "finite": bool(out.isfinite().all())}
    yield from layer_attention_points(LAYERS.GPT_OSS_20B, LONGEST, device.kind)


def error_line(found: Tensor, wanted: Tensor, **labels: Any) -> dict[str, Any]:
    """Return how far rows [rows, heads, head size] are off what is exact."""
    off, rounded = found.double() - wanted, wanted.to(torch.bfloat16).double()
    return {
        "bench": "attention_error",
        **labels,
        "rows": len(found),
        "relative_error": (off.norm() / wanted.norm()).item(),
        "of_rounding_to_bf16": ((rounded - wanted).norm() / wanted.norm()).item(),
        "largest_of_a_head": (off.norm(dim=-1) / wanted.norm(dim=-1)).max().item(),
        "finite": bool(found.isfinite().all()),
    }


def is_off(line: dict[str, Any]) -> bool:
    """Whether a line is of an attention that is further off than rounding explains, or that is no number."""
    if line["bench"] != "attention_error":
        return False
    return not (line["finite"] and line["largest_of_a_head"] <= MOST_OF_A_HEAD)


def layer_attention_points(
    sizes: dict[str, int], length: int, device: str
) -> Iterator[dict[str, Any]]:
    """Relative error of the attention inside decode_layers, of a layer of each kind."""
    for kind in LAYERS.ALTERNATING:
        call = LAYERS.inputs(LAYERS.make_case(kind, [length], sizes, kinds=(kind,)), 3, device)
        [block] = call["weights"].blocks
        for each in (block.qkv.matrix.values, block.qkv.bias_N):
            # As drawn, a dozen keys count in some heads, and pages without them could be left out unnoticed.
            each[: sizes["H"] * sizes["A"]] /= 4
        found, wanted = layer_attention(call, kind)
        labels = {"op": "decode_layers", "implementation": "cuda_stack"}
        yield error_line(found, wanted, **labels, tokens=length, window=block.window_tokens)


def layer_attention(call: dict[str, Any], kind: str) -> tuple[Tensor, Tensor]:
    """Launch one layer; return its attention [1, H, A] out of what blocks left for each other, and in float64."""
    [block], [pages] = call["weights"].blocks, call["kv_pages"]
    num_heads, num_kv_heads, head_dim = len(block.sinks_H), pages.shape[2], pages.shape[4]
    stack = decode_layers.prepare(call["weights"])
    decode_layers.decode_layers(**{**call, "weights": stack})
    workspace = stack.workspace(pages.device)

    def left(at: int, num_rows: int) -> Tensor:
        return workspace[at:][: 2 * num_rows * head_dim].view(torch.bfloat16).view(1, num_rows, -1)

    launchers = decode_layers.LAUNCHERS
    qkv_1FA = left(launchers.call_qkv_at(), num_heads + 2 * num_kv_heads)
    [length], turn_1A = call["lengths_S"].tolist(), call["cos_sin_NA"][call["positions_S"]]
    q_1HA = rotate(qkv_1FA[:, :num_heads], turn_1A).to(torch.bfloat16)
    wanted = exact_rows(
        q_1HA, pages, call[f"{kind}_table_SP"][0], length, block.sinks_H, [0], [length - 1],
        block.window_tokens,
    )  # fmt: skip
    return left(launchers.call_attended_at(), num_heads), wanted


PARTS = {
    "attention": attention_points,
    "layers": layer_points,
    "experts": lambda _device: expert_points(),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--commit", help="of the tree, where it travels without its repository")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=f"of {', '.join(PARTS)}; all unless given",
    )
    arguments = parser.parse_args()
    for name in ("moe_experts", "rms_norm", "gemm", "attention_prefill", "attention_decode"):
        registry.load(name)
    device = detect("cuda")
    facts = {
        "device": torch.cuda.get_device_name(),
        "commit": arguments.commit,
        "command": shlex.join(["python", "benchmarks/design_points.py", *sys.argv[1:]]),
    }
    num_off = 0
    for part in arguments.only:
        for line in PARTS[part](device):
            text = json.dumps({**line, **facts})
            print(text, flush=True)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(text + "\n")
            num_off += is_off(line)
    if num_off:
        print(
            f"error: {num_off} lines have a head that is more than {MOST_OF_A_HEAD} off",
            file=sys.stderr,
        )
    return int(num_off > 0)


if __name__ == "__main__":
    sys.exit(main())
