"""Check, then time, every variant of the CUDA prefill attention on this GPU; JSON lines out.

usage: python benchmarks/attention_variants.py [--variants 0,4,8] [--tokens 8192,32768,128000] [--json FILE]
                                               [--also triton] [--no-check]
A variant that hangs or faults ends its process (the check build traps after two seconds); the parent reports it and
goes on with the next one. Needs torch and nvcc only.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from rose.kernels import registry

registry.load("attention_prefill")
from rose.kernels.attention_prefill import cases, cuda_impl  # noqa: E402
from rose.kernels.attention_prefill.reference import attend  # noqa: E402
from rose.kernels.build import CudaLibrary  # noqa: E402
from rose.kernels.cases import compare, poison  # noqa: E402

H, G, D = 64, 8, 64
RAGGED = [(1, 1), (63, 63), (64, 69), (65, 193), (200, 1200), (513, 813), (1, 700), (192, 192)]
CHECKS = [
    (name, chunks, window, page_tokens)
    for name, chunks, page_tokens in [
        ("one_token", [(1, 1)], 64),
        ("one_tile", [(64, 64)], 64),
        ("square_300", [(300, 300)], 64),
        ("ragged", RAGGED, 64),
        ("ragged_pages_of_128", RAGGED, 128),
        ("square_2000", [(2000, 2000)], 64),
        ("chunk_8192_of_20000", [(8192, 20000)], 64),
    ]
    for window in (None, 128)
] + [("window_of_50", RAGGED, 50, 64), ("window_of_1000", RAGGED, 1000, 64)]


def libraries(variant):
    """Return (for checks, for timing): the first traps where it would hang."""
    library = cuda_impl.variant_library
    return library([variant], defines=["ROSE_WATCHDOG"]), library([variant])


def launcher(library):
    return library.launcher("launch_attention_prefill", cuda_impl.ARGUMENTS)


def draw(chunks, window, page_tokens, seed):
    sizes = {"H": H, "G": G, "D": D, "L": page_tokens}
    case = cases._case("", chunks, sizes, window=window, dtype="bf16", is_strided=True)
    return case, cases.inputs(case, seed, "cuda")


def call(launch, variant, a):
    keys = ("q_THD", "kv_pages", "page_table_SP", "query_starts_S1", "lengths_S", "sinks_H")
    rest = {k: a[k] for k in ("scale", "window_tokens", "out_THD")}
    launch(*cuda_impl.call_arguments(variant, *(a[k] for k in keys), **rest))


def sampled_difference(a, chunks, tolerance, rows_each=96):
    """Compare runs of rows of every sequence (start, middle, end; all of a short one) with float32 attention."""
    starts = a["query_starts_S1"].tolist()
    found, wanted, where = [], [], []
    for s, (new, length) in enumerate(chunks):
        if new <= 3 * rows_each:
            runs = [(0, new)]
        else:
            firsts = (0, new // 2 - 37, new - rows_each)
            runs = [(first, first + rows_each) for first in firsts]
        for begin, end in runs:
            rows = slice(starts[s] + begin, starts[s] + end)
            wanted.append(
                attend(
                    a["q_THD"][rows],
                    a["kv_pages"],
                    a["page_table_SP"][s],
                    a["sinks_H"],
                    last=length - new + end,
                    scale=a["scale"],
                    window_tokens=a["window_tokens"],
                )
            )
            found.append(a["out_THD"][rows])
            where += range(rows.start, rows.stop)
    found, wanted = torch.cat(found).float(), torch.cat(wanted)
    difference = compare("out", found, wanted, tolerance)
    if difference is None:
        return None
    bad = (found - wanted).abs().amax(dim=(1, 2)) > tolerance.absolute * wanted.abs().max()
    bad |= ~torch.isfinite(found).all(dim=2).all(dim=1)
    rows = [where[i] for i in torch.nonzero(bad).flatten()[:12].tolist()]
    return f"{difference}; {int(bad.sum())} of {len(where)} rows bad, first {rows}"


def check(launch, variant, seed):
    problems = []
    for name, chunks, window, page_tokens in CHECKS:
        case, a = draw(chunks, window, page_tokens, seed)
        poison(a["out_THD"])
        call(launch, variant, a)
        torch.cuda.synchronize()
        difference = sampled_difference(a, chunks, cases.tolerance(case))
        if difference is not None:
            problems.append(f"{name} window {window}: {difference}")
    return problems


def time_us(function):
    """Median of graph replays; as many calls in a graph as make about 10 ms."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    function()
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    calls = int(min(32, max(1, 10 / begin.elapsed_time(end))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    graph.replay()
    samples = []
    for _ in range(3 if begin.elapsed_time(end) > 100 else 9):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(samples)


def report(line):
    print(json.dumps({"bench": "attention_variants", **line}), flush=True)


def time_all(label, run, tokens, limit_ms):
    """Time `run(arguments)` on prompts of these lengths, full and windowed, and on a ragged batch."""
    shapes = [(str(t), [(t, t)], w) for t in tokens for w in (None, 128)]
    shapes += [("8x1024", [(1024, 1024)] * 8, w) for w in (None, 128)]
    shapes += [("chunk_8192_of_65536", [(8192, 65536)], None)]
    for name, chunks, window in shapes:
        case, a = draw(chunks, window, 64, 5)
        us = time_us(lambda a=a: run(a))
        line = {**label, "shape": name, "window": window, "median_us": round(us, 1)}
        report({**line, "tflops": round(cases.flops(case) / us / 1e6, 1)})
        del a
        torch.cuda.empty_cache()
        if window is None and us > limit_ms * 1e3:
            break


def host_us(launch, variant):
    """Time what a call costs the host, on a tiny input."""
    _, a = draw([(1, 1)], None, 64, 0)
    call(launch, variant, a)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(200):
        call(launch, variant, a)
    return (time.perf_counter() - begin) / 200 * 1e6


def child(arguments):
    for variant in arguments.variants:
        checked, timed = (launcher(library) for library in libraries(variant))
        label = {"variant": variant, "what": cuda_impl.VARIANTS[variant]}
        report({**label, "status": "started"})
        problems = [] if arguments.no_check else check(checked, variant, arguments.seed)
        report({**label, "status": "wrong" if problems else "right", "problems": problems[:6]})
        if not problems:
            report({**label, "host_us": round(host_us(timed, variant), 2)})
            time_all(label, partial(call, timed, variant), arguments.tokens, 1e9)
        report({**label, "status": "done"})
    for name in arguments.also:
        (other,) = (i for i in registry.implementations("attention_prefill") if i.name == name)
        time_all(
            {"implementation": name}, lambda a, o=other: o.function(**a), arguments.tokens, 100
        )


def parent(arguments, file):
    begin = time.perf_counter()
    wanted = [library for variant in arguments.variants for library in libraries(variant)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # of compilers, which are processes
        built = list(pool.map(CudaLibrary.build, wanted))
    lines = [line for b in built for line in b.log.splitlines()]
    warnings = [t for t in lines if "Potential" in t or "C7508" in t]
    report({"build_s": round(time.perf_counter() - begin, 1), "warnings": warnings})
    left = list(arguments.variants)
    while left or arguments.also:
        command = [sys.executable, __file__, "--child", "--seed", str(arguments.seed)]
        command += ["--variants", ",".join(map(str, left)), "--also", ",".join(arguments.also)]
        command += ["--tokens", ",".join(map(str, arguments.tokens))]
        command += ["--no-check"] if arguments.no_check else []
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        tail = []
        for text in process.stdout:
            if not text.startswith('{"bench"'):
                tail = [*tail[-12:], text.rstrip()[:300]]
                continue
            print(text, end="", flush=True)
            if file:
                file.write(text)
                file.flush()
            line = json.loads(text)
            if line.get("status") == "done":
                left.remove(line["variant"])
        if process.wait() == 0:
            return
        failed = left.pop(0) if left else arguments.also.pop()
        report({"variant": failed, "status": "process failed", "tail": tail})


def numbers(text):
    return [int(n) for n in text.split(",") if n]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    known = list(range(len(cuda_impl.VARIANTS)))
    parser.add_argument("--variants", type=numbers, default=known)
    parser.add_argument("--tokens", type=numbers, default=[8192, 32768])
    parser.add_argument("--also", type=lambda t: [n for n in t.split(",") if n], default=[])
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--child", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
    elif arguments.json:
        with arguments.json.open("a") as file:
            parent(arguments, file)
    else:
        parent(arguments, None)


if __name__ == "__main__":
    main()
