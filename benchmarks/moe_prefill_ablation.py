"""What limits the FP8 expert products: time them with one cost at a time taken out of the kernel's source.

    PYTHONPATH=src python benchmarks/moe_prefill_ablation.py --out ablation.jsonl

Each ablation is a set of text replacements in a copy of the sources, which must match; what it computes is wrong
by design and is not checked. 20b, 8192 tokens, every expert the same number of rows, so that all tiles are full.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from rose.kernels.build import CudaLibrary
from rose.kernels.moe_experts import cuda_prefill

sys.path.insert(0, str(Path(__file__).parent))
from moe_prefill_variants import SIZES, balanced_ids, draw, time_us

FOLDER = Path(cuda_prefill.__file__).parent
TOKENS = 8192
PRODUCTS = [
    ("gate_up", 256, False),
    ("down", 256, False),
    ("down", 192, False),
]
Edits = list[tuple[str, str]]

PROMOTION: Edits = [
    (f"total[s][4 * j{plus}] += part[4 * j{plus}] * {scale}[segment];", f"total[s][4 * j{plus}] = part[4 * j{plus}];")
    for plus, scale in (("", "c0"), (" + 1", "c0"), (" + 2", "c1"), (" + 3", "c1"))
]  # fmt: skip
KEEP = "for (int s = 0; s < S::kSubs; ++s) settle(total[s]);"
EPILOGUE: Edits = [
    ("store_hidden<S>(total, p, item, row, q, subs);", KEEP),
    ("store_rows<S>(total, p, item, row, q);", KEEP),
]
BIAS: Edits = [
    (
        "seed_with_bias<S>(total, p, item, q);",
        "for (int s = 0; s < S::kSubs; ++s) for (int j = 0; j < S::kSub / 2; ++j) total[s][j] = 0.f;",
    )
]
WEIGHT_SCALES: Edits = [
    (
        "__ldg(p.w_scales + (size_t(item.expert) * column_blocks + block) * k_blocks + k_block)",
        "float(k_block + block * 0 * column_blocks * k_blocks)",
    )
]
LOADS: Edits = [
    ("mbarrier_arrive_expect(barrier, bytes);", "mbarrier_arrive(barrier);\ncontinue;"),
]
ITEMS: Edits = [
    (
        "const Item item = locate<S::kCluster>(p.rows, units, i, runs, rank);\n    if (warpgroup",
        "Item item; item.expert = i & 31; item.run = i % runs; item.row = (i & 255) * 128; item.rows = 128;\n"
        "    if (warpgroup",
    )
]
ORDER: Edits = [
    (
        "      wgmma_fence();\n#pragma unroll\n      for (int step",
        "      named_sync(1 + threadIdx.x / 128, 256);\n      wgmma_fence();\n#pragma unroll\n      for (int step",
    ),
    (
        "      wgmma_commit();\n      wgmma_wait<0>();",
        "      wgmma_commit();\n      named_arrive(1 + (threadIdx.x / 128 ^ 1), 256);\n      wgmma_wait<0>();",
    ),
    (
        "  const int k_full = p.k / kBlockK;\n",
        "  const int k_full = p.k / kBlockK;\n  if (warpgroup == 1) named_arrive(1, 256);\n",
    ),
]
LAG: Edits = [
    (
        "  const int k_full = p.k / kBlockK;\n",
        "  const int k_full = p.k / kBlockK;\n  if (warpgroup == 1) __nanosleep(2000);\n",
    )
]
ABLATIONS: dict[str, Edits] = {
    "as_it_is": [],
    "no_promotion": PROMOTION,
    "no_epilogue": EPILOGUE,
    "no_bias": BIAS,
    "no_weight_scales": WEIGHT_SCALES,
    "no_items": ITEMS,
    "no_tile_ends": EPILOGUE + BIAS + ITEMS,
    "no_loads": LOADS,
    "no_loads_no_promotion": LOADS + PROMOTION,
    "products_and_loads": PROMOTION + EPILOGUE + BIAS + WEIGHT_SCALES + ITEMS,
    "products_only": LOADS + PROMOTION + EPILOGUE + BIAS + WEIGHT_SCALES + ITEMS,
    "consumers_in_order": ORDER,
    "second_consumer_late": LAG,
}


def edited(name: str, edits: Edits, root: Path) -> cuda_prefill.PrefillLibrary:
    """Copy the sources, apply the replacements and compile.

    Raises  ValueError where a text is not found exactly once
    """
    folder = root / name
    folder.mkdir()
    for path in (*FOLDER.glob("*.cuh"), FOLDER / "prefill_sm90.cu"):
        shutil.copy(path, folder)
    path = folder / "prefill_grouped.cuh"
    text = path.read_text()
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{name}: found {text.count(old)} times, wanted once: {old}")
        text = text.replace(old, new)
    path.write_text(text)
    return cuda_prefill.PrefillLibrary(CudaLibrary(folder / "prefill_sm90.cu", cache=root))


def clocks(call: Any) -> str:
    """Return the clock and power while the product runs on and on."""
    for _ in range(400):
        call()
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    torch.cuda.synchronize()
    return said


def calls(library: cuda_prefill.PrefillLibrary, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return each product as a closure; every one reads what the first gate-up wrote."""
    weights, sizes = arguments["weights"], SIZES["20b"]
    table = library.sort_by_expert(arguments["expert_ids_TK"], num_experts=sizes["E"])
    rows = library.quantize_rows(arguments["x_TD"], table)

    def gate_up(columns: int, cluster: bool) -> Any:
        return library.gate_up(
            *rows, table, values_EFD=weights.gate_up.values, scales=weights.gate_up.scales,
            bias_EF=weights.gate_up_bias_EF, alpha=1.702, limit=7.0, columns=columns, cluster=cluster,
        )  # fmt: skip

    hidden = gate_up(256, False)

    def down(columns: int, cluster: bool) -> Any:
        return library.down(
            *hidden, table, values_EDI=weights.down.values, scales=weights.down.scales,
            bias_ED=weights.down_bias_ED, group=128, columns=columns, cluster=cluster,
        )  # fmt: skip

    made = {"gate_up": gate_up, "down": down}
    return {
        f"{name}_{columns}{'_c2' * cluster}": lambda f=made[name], c=columns, k=cluster: f(c, k)
        for name, columns, cluster in PRODUCTS
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(ABLATIONS), choices=list(ABLATIONS))
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--jobs", type=int, default=14, help="compilers at once")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        libraries = {n: edited(n, ABLATIONS[n], Path(folder)) for n in arguments.only}
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(lambda library: library.library.build(), libraries.values()))
        if arguments.build_only:
            return 0
        sizes = SIZES["20b"]
        base = draw(sizes, 1, "fp8_block", seed=1)[1]
        drawn = draw({**sizes, "I": 32}, TOKENS, "mxfp4", seed=2)[1]
        ids = balanced_ids(TOKENS, sizes["E"], sizes["K"])
        inputs = {**drawn, "weights": base["weights"], "expert_ids_TK": ids}
        flops = 2 * TOKENS * sizes["K"] * sizes["D"] * sizes["I"]
        for name, library in libraries.items():
            for product, call in calls(library, inputs).items():
                median, least = time_us(call, replays=5)
                line = {
                    "bench": "moe_prefill_ablation",
                    "ablation": name,
                    "product": product,
                    "median_us": round(median, 1),
                    "min_us": round(least, 1),
                    "tflops": round(flops * (1 + ("gate" in product)) / median / 1e6, 1),
                }
                if name in ("as_it_is", "products_only"):
                    line["clocks"] = clocks(call)
                line["at"] = round(time.monotonic(), 1)
                print(json.dumps(line), flush=True)
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
