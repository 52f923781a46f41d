"""Check, then time, variants of the CUDA prefill attention on this GPU; JSON lines out.

usage: python benchmarks/attention_variants.py [--variants 38,40] [--tokens 8192,32768] [--rounds 3] [--last 128000]
                                               [--seconds N] [--also triton] [--json FILE] [--seed N]
Every variant is compiled for itself, all at once. Checks run a build that traps after two seconds where it would
hang; a variant that hangs or faults ends its process, and the parent goes on without it. Those that are right are
timed in turn, shape by shape, in rounds, with the clock of the multiprocessors as they run, then profiled (clocks per
tile of keys by phase); the fastest also runs `--last` tokens. After `--seconds` nothing new is begun and what is
missing is said. Needs torch and nvcc only.
"""

import argparse
import ctypes
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
from rose.utils.device import num_multiprocessors  # noqa: E402

H, G, D = 64, 8, 64
RAGGED = [(1, 1), (63, 63), (64, 69), (65, 193), (200, 1200), (513, 813), (1, 700), (192, 192)]
CHECKS = [
    (name, chunks, window, page_tokens, None)
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
] + [("window_of_50", RAGGED, 50, 64, None), ("window_of_1000", RAGGED, 1000, 64, None)]


def uneven(a):
    """Keys of some pages are up to 16 times as long: maxima grow in any tile, by far more than 2^8."""
    keys = a["kv_pages"][:, 0]
    keys *= torch.exp2(4 * torch.rand(len(keys), 1, 1, 1, device=keys.device)).to(keys.dtype)


def negative(a):
    """All scores are about -70, and the sink is far below."""
    keys, q = a["kv_pages"][:, 0], a["q_THD"]
    common = torch.randn(keys.shape[-1], device=keys.device).to(keys.dtype)
    common *= 8 / common.float().norm().to(keys.dtype)
    keys.copy_(keys * 0.5 + 3 * common)
    q.copy_(q * 0.5 - 3 * common)
    a["sinks_H"].fill_(-300.0)


CHECKS += [
    (f"{change.__name__}_{name}", chunks, window, 64, change)
    for change in (uneven, negative)
    for name, chunks in (("ragged", RAGGED), ("square_2000", [(2000, 2000)]))
    for window in (None, 128)
]


PIPES = ("ex2", "ex2_bf16x2", "fma", "max", "max3", "pack", "shuffle")
PHASES = ("data", "turn", "scores", "softmax", "output", "pack", "outside")
WINDOWED = (40,)
"""Variants that serve narrow windows only; timed only there."""


def library(variant, *defines):
    return cuda_impl.variant_library([variant], defines=defines)


def needed_libraries(variants):
    """Return (for checks, for timing, for profiles) of all."""
    kinds = (("ROSE_WATCHDOG",), (), ("ROSE_PROFILE",))
    return [
        library(v, *k) for v in variants for k in kinds if not (v == 40 and "PROFILE" in str(k))
    ]


def launcher(library):
    return library.launcher("launch_attention_prefill", "p")


def draw(chunks, window, page_tokens, seed):
    sizes = {"H": H, "G": G, "D": D, "L": page_tokens}
    case = cases.make_case("", chunks, sizes, window=window, dtype="bf16", is_strided=True)
    return case, cases.inputs(case, seed, "cuda")


ORDER = ("q_THD", "kv_pages", "page_table_SP", "query_starts_S1", "lengths_S", "sinks_H")
ORDER += ("scale", "window_tokens", "out_THD")


def call(launch, variant, a):
    launch(cuda_impl.pack_call(variant, *(a[name] for name in ORDER)))


class Check:
    """One case: its call, and float32 attention for runs of rows of every sequence (all of a short one)."""

    def __init__(self, name, chunks, window, page_tokens, change, seed, rows_each=96):
        self.name, self.window = name, window
        case, self.a = draw(chunks, window, page_tokens, seed)
        self.tolerance = cases.tolerance(case)
        if change is not None:
            change(self.a)
        a, starts = self.a, self.a["query_starts_S1"].tolist()
        wanted, self.rows = [], []
        for s, (new, length) in enumerate(chunks):
            runs = [(0, new)]
            if new > 3 * rows_each:
                firsts = (0, new // 2 - 37, new - rows_each)
                runs = [(first, first + rows_each) for first in firsts]
            for begin, end in runs:
                rows = slice(starts[s] + begin, starts[s] + end)
                self.rows += range(rows.start, rows.stop)
                wanted.append(
                    attend(
                        a["q_THD"][rows],
                        a["kv_pages"],
                        a["page_table_SP"][s],
                        a["sinks_H"],
                        last=length - new + end,
                        scale=a["scale"],
                        window_tokens=window,
                    )
                )
        self.wanted = torch.cat(wanted)

    def problem(self, launch, variant):
        poison(self.a["out_THD"])
        call(launch, variant, self.a)
        torch.cuda.synchronize()
        found, wanted = self.a["out_THD"][self.rows].float(), self.wanted
        difference = compare("out", found, wanted, self.tolerance)
        if difference is None:
            return None
        bad = (found - wanted).abs().amax(dim=(1, 2)) > self.tolerance.absolute * wanted.abs().max()
        bad |= ~torch.isfinite(found).all(dim=2).all(dim=1)
        rows = [self.rows[i] for i in torch.nonzero(bad).flatten()[:12].tolist()]
        where = f"{int(bad.sum())} of {len(self.rows)} rows bad, first {rows}"
        return f"{self.name} window {self.window}: {difference}; {where}"


def check(checks, variant):
    launch = launcher(library(variant, "ROSE_WATCHDOG"))
    fitting = [c for c in checks if variant != 40 or (c.window and c.window <= 129)]
    return [p for p in (c.problem(launch, variant) for c in fitting) if p is not None]


class Timed:
    """A call in a graph, as often as makes about 10 ms."""

    def __init__(self, function):
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        function()
        self.begin.record()
        function()
        self.end.record()
        torch.cuda.synchronize()
        taken = self.begin.elapsed_time(self.end)
        self.calls = int(min(32, max(1, 10 / taken)))
        self.samples = 3 if taken > 10 else 9
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(self.calls):
                function()

    def us(self, gpu=None):
        """Median of replays, and what the GPU said of itself during the last."""
        self.graph.replay()
        samples, state = [], {}
        for i in range(self.samples):
            self.begin.record()
            self.graph.replay()
            self.end.record()
            if gpu is not None and i == self.samples - 1:
                state = gpu.state()
            self.end.synchronize()
            samples.append(self.begin.elapsed_time(self.end) * 1e3 / self.calls)
        return statistics.median(samples), state


class Gpu:
    """The first GPU's own gauges, by NVML; a missing library is said once."""

    def __init__(self):
        self.library, self.handle = None, ctypes.c_void_p()
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as problem:
            report({"nvml": str(problem)})
            return
        failed = library.nvmlInit_v2()
        failed = failed or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.handle))
        if failed:
            report({"nvml": f"error {failed}"})
        else:
            self.library = library

    def state(self):
        if self.library is None:
            return {}
        mhz, milliwatts = ctypes.c_uint(), ctypes.c_uint()
        failed = self.library.nvmlDeviceGetClockInfo(self.handle, 1, ctypes.byref(mhz))
        failed |= self.library.nvmlDeviceGetPowerUsage(self.handle, ctypes.byref(milliwatts))
        return {} if failed else {"sm_mhz": mhz.value, "watts": milliwatts.value // 1000}


def report(line):
    print(json.dumps({"bench": "attention_variants", **line}), flush=True)


CHUNK = ("chunk_16384_of_65536", [(16384, 65536)])


def shapes(tokens, windows):
    prompts = [(str(t), [(t, t)]) for t in tokens] + [("8x1024", [(1024, 1024)] * 8), CHUNK]
    return [(name, chunks, window) for window in windows for name, chunks in prompts]


def time_shape(labels, runs, shape, rounds, gpu=None):
    """Report each run's time in every round, then the median of its rounds; return these.

    All runs take the same inputs, one after the other in each round, so that clocks which wander meet all of them.
    """
    name, chunks, window = shape
    case, a = draw(chunks, window, 64, 5)
    timed = {key: Timed(partial(run, a)) for key, run in runs.items()}
    taken = {key: [] for key in runs}
    for turn in range(1, rounds + 1):
        for key, one in timed.items():
            us, state = one.us(gpu)
            taken[key].append(us)
            line = {**labels[key], "shape": name, "window": window, "round": turn, **state}
            report({**line, "us": round(us, 1), "tflops": round(cases.flops(case) / us / 1e6, 1)})
    medians = {key: statistics.median(samples) for key, samples in taken.items()}
    for key, us in medians.items():
        line = {**labels[key], "shape": name, "window": window, "rounds": rounds}
        line |= {"median_us": round(us, 1), "tflops": round(cases.flops(case) / us / 1e6, 1)}
        report({**line, "spread": round(max(taken[key]) / min(taken[key]) - 1, 3)})
    del timed
    torch.cuda.empty_cache()
    return medians


def profile(label, variant, tokens):
    """Report the clocks that a warpgroup spends per tile of keys, by phase, and the clock of the multiprocessors."""
    built = library(variant, "ROSE_PROFILE")
    launch, read = launcher(built), built.launcher("read_attention_profile", "p")
    _, a = draw([(tokens, tokens)], None, 64, 5)
    totals = (ctypes.c_uint64 * (len(PHASES) + 3))()
    for _ in range(2):  # the first warms up
        for _ in range(3):
            call(launch, variant, a)
        torch.cuda.synchronize()
        read(ctypes.addressof(totals))
    *phases, tiles, clocks, nanoseconds = totals
    spent = {name: round(n / tiles, 1) for name, n in zip(PHASES, phases, strict=True)}
    report({**label, "profile": spent, "tiles": tiles, "ghz": round(clocks / nanoseconds, 3)})


def pipe_rates():
    """Report how many clocks a scheduler needs per warp instruction."""
    rates = CudaLibrary(Path(__file__).with_name("pipe_rates.cu"))
    out = torch.zeros(len(PIPES) + 1, dtype=torch.int32, device="cuda")
    for _ in range(2):
        rates.launcher("launch_pipe_rates", "pp")(out.data_ptr(), 0)
        torch.cuda.synchronize()
    clocks = [round(n / (4 * 8 * 512), 2) for n in out.tolist()]
    report({"clocks_per_instruction": dict(zip(PIPES, clocks, strict=False))})


PRODUCTS = {
    "64x128, both in shared memory": (0, 64 * 128),
    "64x64, both in shared memory": (1, 64 * 64),
    "64x64, one in registers": (2, 64 * 64),
    "64x64, one in registers, the other transposed": (3, 64 * 64),
    "64x128, one in registers": (4, 64 * 128),
}


def product_rates():
    """Report clocks per product of depth 16, and per exponential of a warp, alone and beside one another."""
    rates = CudaLibrary(Path(__file__).with_name("product_rates.cu"))
    launch = rates.launcher("launch_product_rates", "iiippip")
    out = torch.zeros(2, dtype=torch.int32, device="cuda")
    blocks = num_multiprocessors(0)
    for name, (work, _) in PRODUCTS.items():
        found = {}
        for products, exponentials in ((1, 0), (2, 0), (3, 0), (1, 1), (1, 2), (2, 1)):
            for _ in range(2):
                out.zero_()
                launch(work, products, exponentials, out.data_ptr(), out.data_ptr(), blocks, 0)
                torch.cuda.synchronize()
            clocks = [
                round(n / d, 1)
                for n, d in zip(out.tolist(), (128 * 8 * products, 128 * 64), strict=True)
            ]
            found[f"{products}+{exponentials}"] = clocks
        report({"product": name, "clocks_per_product_and_exponential": found})


def host_us(a, function):
    """Time what a call costs the host: the best of ten times 100, on a tiny input."""
    taken = []
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            function(a)
        taken.append((time.perf_counter() - begin) * 1e4)
    return round(min(taken), 2)


def host_costs():
    """Report the host's cost of what is bound: a whole call, its packing, its launcher."""
    _, a = draw([(1, 1)], None, 64, 0)
    packed = cuda_impl.pack_call(cuda_impl.FULL_VARIANT, *(a[name] for name in ORDER))
    launch = launcher(cuda_impl.variant_library(cuda_impl.BOUND))
    costs = {
        "call": host_us(a, lambda a: cuda_impl.attention_prefill(**a)),
        "pack": host_us(
            a, lambda a: cuda_impl.pack_call(cuda_impl.FULL_VARIANT, *(a[n] for n in ORDER))
        ),
        "launch": host_us(a, lambda _: launch(packed)),
    }
    report({"host_us": costs})


def child(arguments):
    """Check `--variants`, then time those and the ones `--right` already."""

    def is_late(what):
        late = arguments.seconds and time.time() > arguments.until
        if late:
            report({"left_out": what})
        return late

    right = list(arguments.right)
    checks = [Check(*c, arguments.seed) for c in CHECKS] if arguments.variants else []
    for variant in arguments.variants:
        label = {"variant": variant, "what": cuda_impl.VARIANTS[variant]}
        report({**label, "status": "started"})
        problems = check(checks, variant)
        report({**label, "status": "wrong" if problems else "right", "problems": problems[:6]})
        right += [] if problems else [variant]
    del checks
    gpu = Gpu()
    labels = {v: {"variant": v, "what": cuda_impl.VARIANTS[v]} for v in right}
    runs = {v: partial(call, launcher(library(v)), v) for v in right}
    full = [v for v in right if v not in WINDOWED]
    longest: dict[int, float] = {}
    for window, kind in ((None, full), (128, [v for v in right if v in WINDOWED])):
        for shape in shapes(arguments.tokens, [window]) if kind else []:
            if is_late(f"{shape[0]}, window {window}"):
                continue
            chosen = {v: runs[v] for v in kind}
            medians = time_shape(labels, chosen, shape, arguments.rounds, gpu)
            if shape[0] == str(max(arguments.tokens)) and window is None:
                longest = medians
    for v in full:
        if not is_late(f"profile of {v}"):
            profile(labels[v], v, 32768)
    if not is_late("rates"):
        pipe_rates()
        product_rates()
    if not is_late("host costs"):
        host_costs()
    if longest and arguments.last and not is_late("the last"):
        best = min(longest, key=lambda v: longest[v])
        last = (str(arguments.last), [(arguments.last,) * 2], None)
        time_shape(labels, {best: runs[best]}, last, 1, gpu)
    for name in arguments.also:
        (other,) = (i for i in registry.implementations("attention_prefill") if i.name == name)
        for shape in shapes(arguments.tokens, (None, 128)):
            label = {name: {"implementation": name}}
            time_shape(label, {name: lambda a, o=other: o.function(**a)}, shape, arguments.rounds)


def parent(arguments, file):
    begin = time.perf_counter()
    wanted = [*needed_libraries(arguments.variants), cuda_impl.variant_library(cuda_impl.BOUND)]
    wanted += [
        CudaLibrary(Path(__file__).with_name(f"{name}_rates.cu")) for name in ("pipe", "product")
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # of compilers, which are processes
        logs = [built.log for built in pool.map(CudaLibrary.build, wanted)]
    warnings = [t for log in logs for t in log.splitlines() if "Potential" in t or "C7508" in t]
    report({"build_s": round(time.perf_counter() - begin, 1), "warnings": warnings})
    left, right = list(arguments.variants), []
    while True:
        command = [sys.executable, __file__, "--child", "--seed", str(arguments.seed)]
        command += ["--variants", ",".join(map(str, left)), "--also", ",".join(arguments.also)]
        command += ["--right", ",".join(map(str, right)), "--last", str(arguments.last)]
        command += ["--tokens", ",".join(map(str, arguments.tokens))]
        command += ["--rounds", str(arguments.rounds), "--seconds", str(arguments.seconds)]
        command += ["--until", str(arguments.until)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        tail, started = [], None
        for text in process.stdout or ():
            if not text.startswith('{"bench"'):
                tail = [*tail[-12:], text.rstrip()[:300]]
                continue
            print(text, end="", flush=True)
            if file:
                file.write(text)
                file.flush()
            line = json.loads(text)
            status = line.get("status")
            if status == "started":
                started = line["variant"]
            elif status in ("right", "wrong"):
                left.remove(started)
                right += [started] if status == "right" else []
                started = None
        if process.wait() == 0:
            break
        report({"variant": started, "status": "process failed", "tail": tail})
        if started is None:  # not in a check: what would come next is unknown
            sys.exit(1)
        left.remove(started)
    report({"wall_s": round(time.perf_counter() - begin, 1)})


def numbers(text):
    return [int(n) for n in text.split(",") if n]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", type=numbers, default=list(cuda_impl.VARIANTS))
    parser.add_argument("--right", type=numbers, default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0, help="0: as long as it takes")
    parser.add_argument("--until", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--last", type=int, default=128000, help="0: none")
    parser.add_argument("--tokens", type=numbers, default=[8192, 32768])
    parser.add_argument("--also", type=lambda t: [n for n in t.split(",") if n], default=[])
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true")
    arguments = parser.parse_args()
    arguments.until = arguments.until or time.time() + arguments.seconds
    if arguments.child:
        child(arguments)
    elif arguments.json:
        with arguments.json.open("a") as file:
            parent(arguments, file)
    else:
        parent(arguments, None)


if __name__ == "__main__":
    main()
