"""Time launch shapes of the Triton attention kernels on this GPU, each checked first.

usage: python benchmarks/attention_triton_variants.py [--json FILE] [--quick]
Prefill shapes are one sequence of new tokens; decode shapes are batches at one context, KV in random pages.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from rose.kernels import registry

for name in ("attention_decode", "attention_prefill"):
    registry.load(name)
from rose.kernels.attention_decode import triton_impl as decode  # noqa: E402
from rose.kernels.attention_prefill import triton_impl as prefill  # noqa: E402

H, G, D, L = 64, 8, 64, 64


def time_us(call, repeats=20):
    """Median of graph replays, 8 calls each; inputs larger than L2 are the caller's business."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            call()
    samples = []
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(repeats):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / 8)
    return statistics.median(samples)


def paged(num_sequences, length, seed):
    """KV in random order of pages."""
    g = torch.Generator("cuda").manual_seed(seed)
    columns = -(-length // L)
    pages = num_sequences * columns
    kv = torch.randn(pages, 2, G, L, D, generator=g, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(pages, generator=g, device="cuda").int()
    lengths = torch.full((num_sequences,), length, dtype=torch.int32, device="cuda")
    sinks = torch.randn(H, generator=g, device="cuda")
    return kv, order.view(num_sequences, columns), lengths, sinks


def exact_rows(q, kv, table, length, sinks, rows, positions, window):
    """Attention of chosen rows in float64."""
    heads, groups = q.shape[1], kv.shape[2]
    k = kv[table.long(), 0].permute(1, 0, 2, 3).reshape(groups, -1, D)[:, :length].double()
    v = kv[table.long(), 1].permute(1, 0, 2, 3).reshape(groups, -1, D)[:, :length].double()
    out = torch.empty(len(rows), heads, D, dtype=torch.float64, device=kv.device)
    for i, (row, p) in enumerate(zip(rows, positions, strict=True)):
        low = 0 if window is None else max(0, p - window + 1)
        qg = q[row].double().view(groups, heads // groups, D)
        score = torch.einsum("ghd,gtd->ght", qg, k[:, low : p + 1]).flatten(0, 1) / 8
        score = torch.cat([score, sinks.double()[:, None]], 1).softmax(1)[:, :-1]
        weights = score.view(groups, heads // groups, -1)
        out[i] = torch.einsum("ght,gtd->ghd", weights, v[:, low : p + 1]).flatten(0, 1)
    return out


def run_prefill(tokens, window, launches, report):
    kv, table, lengths, sinks = paged(1, tokens, 1)
    q = torch.randn(tokens, H, D, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)
    rows = sorted({0, 1, 63, 64, 127, 128, 129, tokens // 2, tokens - 65, tokens - 1})
    wanted = exact_rows(q, kv, table[0], tokens, sinks, rows, rows, window)
    pairs = tokens * (tokens + 1) // 2 if window is None else tokens * min(window, tokens)
    for launch in launches:
        out.fill_(float("nan"))

        def call(launch=launch):
            prefill.run(
                q, kv, table, starts, lengths, sinks, scale=0.125, window_tokens=window,
                max_query_tokens=tokens, out_THD=out, launch=launch,
            )  # fmt: skip

        line = {"op": "attention_prefill", "tokens": tokens, "window": window}
        line["launch"] = str(launch)
        try:
            call()
            line["error"] = ((out[rows].double() - wanted).norm() / wanted.norm()).item()
            if line["error"] < 6e-3 and not out.isnan().any().item():
                line["us"] = time_us(call, 5 if tokens > 20000 else 15)
                line["tflops"] = 4 * pairs * H * D / line["us"] / 1e6
        except Exception as e:  # noqa: BLE001 - the other shapes still count
            line["failed"] = repr(e)[:200]
        report(line)


def run_decode(batch, length, window, launches, report):
    copies = max(1, min(8, int(160e6 / (batch * length * 2048))))
    sets = [paged(batch, length, seed) for seed in range(copies)]
    q = torch.randn(batch, H, D, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    kv, table, _, sinks = sets[0]
    wanted = exact_rows(q, kv, table[0], length, sinks, [0], [length - 1], window)
    seen = length if window is None else min(window, length)
    for launch in launches:
        out.fill_(float("nan"))
        turn = iter(range(1 << 30))

        def call(launch=launch, turn=turn):
            kv, table, lengths, sinks = sets[next(turn) % copies]
            decode.run(
                q, kv, table, lengths, sinks, scale=0.125, window_tokens=window, out_SHD=out,
                launch=launch,
            )  # fmt: skip

        line = {"op": "attention_decode", "batch": batch, "length": length, "window": window}
        line["launch"] = str(launch)
        try:
            call()
            line["error"] = ((out[:1].double() - wanted).norm() / wanted.norm()).item()
            if line["error"] < 6e-3 and not out.isnan().any().item():
                line["us"] = time_us(call)
                line["tb_s"] = batch * seen * 2048 / line["us"] / 1e6
        except Exception as e:  # noqa: BLE001 - the other shapes still count
            line["failed"] = repr(e)[:200]
        report(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    lines = []

    def report(line):
        lines.append(line)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps({**line, "device": torch.cuda.get_device_name()}) + "\n")

    def shapes(*rows):
        names = ("block_queries", "block_tokens", "num_warps", "num_stages")
        return [prefill.Launch(**dict(zip(names, r, strict=True))) for r in rows]

    full = shapes(
        (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2)
    )
    small = shapes((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 3), (32, 64, 4, 2))
    run_prefill(8192, None, full, report)
    run_prefill(8192, 128, small, report)
    if not args.quick:
        run_prefill(32768, None, full[:2], report)
        run_prefill(32768, 128, small[:2], report)

    def parts(*rows, splits=(1,)):
        return [
            decode.Launch(block_tokens=b, num_splits=s, num_warps=w, num_stages=st)
            for s in splits
            for b, w, st in rows
        ]

    for batch, length in ((1, 8192), (8, 8192), (32, 8192), (128, 8192), (1, 32768), (32, 32768)):
        splits = sorted({max(1, min(128, -(-132 * k // (batch * G)))) for k in (2, 4, 8, 16)})
        rows = ((64, 4, 3), (64, 2, 4), (64, 1, 4), (128, 4, 3))
        run_decode(batch, length, None, parts(*rows, splits=splits), report)
    for batch in (1, 8, 32, 128):
        rows = ((64, 4, 2), (64, 2, 2), (128, 4, 1), (32, 2, 3), (64, 4, 3))
        run_decode(batch, 8192, 128, parts(*rows), report)
    for line in lines:
        print({k: (round(v, 4) if isinstance(v, float) else v) for k, v in line.items()})


if __name__ == "__main__":
    main()
