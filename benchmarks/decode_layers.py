"""Time all layers of a model in one launch (decode_layers, one sequence), and say where a layer's time goes.

    PYTHONPATH=src python benchmarks/decode_layers.py [--size 20b 120b] [--contexts 1024 8192 32000] [--json FILE.jsonl]
    ... --timeline: a build that notes clocks, and per kind of layer what passes between two marks: median, least, most

Weights, pages and tables are those of the operation's timed cases, so that every layer has its own; the check of the
kernel is elsewhere (`rose.kernels check decode_layers`). Medians of five replays of a graph of 30 launches, with a copy
of the stream before each.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from rose.bench.record import append
from rose.kernels import registry
from rose.kernels.build import CudaLibrary
from rose.kernels.check import cases_module

registry.load("decode_layers")
cuda_impl: Any = importlib.import_module("rose.kernels.decode_layers.cuda_impl")
CASES: Any = cases_module("decode_layers")
SIZES = {"20b": (CASES.GPT_OSS_20B, 24), "120b": (CASES.GPT_OSS_120B, 36)}
BLOCKS = cuda_impl.NUM_CUDA_BLOCKS
PLAN = cuda_impl.LIBRARY.source.with_name("layers_plan.cuh")
MARKS = re.findall(r"k(\w+)", re.search(r"enum Mark \{(.*), kMarks \}", PLAN.read_text())[1])


def call_of(size: str, context: int) -> dict[str, Any]:
    """Draw a call on the GPU, with weights prepared as at load."""
    sizes, num_blocks = SIZES[size]
    kinds = CASES.ALTERNATING * (num_blocks // 2)
    case = CASES.make_case("timed", [context], sizes, kinds=kinds, large=True, timed=True)
    call = CASES.inputs(case, 0, "cuda")
    return {**call, "weights": cuda_impl.prepare(call["weights"])}


def launch(call: dict[str, Any], residual_SD: torch.Tensor) -> None:
    """Run all layers on a copy of the stream, which grows with every call otherwise."""
    residual_SD.copy_(call["residual_SD"])
    cuda_impl.decode_layers(**{**call, "residual_SD": residual_SD})


def time_of(call: dict[str, Any], *, launches: int = 30, replays: int = 5) -> float:
    """Return microseconds of a launch."""
    residual_SD = torch.empty_like(call["residual_SD"])
    launch(call, residual_SD)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            launch(call, residual_SD)
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples = []
    for _ in range(replays):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / launches)
    assert residual_SD.isfinite().all()
    return statistics.median(samples)


def timeline(call: dict[str, Any]) -> dict[str, dict[str, list[int]]]:
    """Return kind of layer -> mark -> nanoseconds since the mark before: median, least, most of blocks and layers."""
    residual_SD = torch.empty_like(call["residual_SD"])
    for _ in range(3):
        launch(call, residual_SD)
        torch.cuda.synchronize()
    num_layers, count = len(call["weights"].blocks), BLOCKS * cuda_impl.MAX_BLOCKS * len(MARKS)
    workspace = call["weights"].workspace(residual_SD.device)
    at_BLM = workspace[-8 * count :].view(torch.int64).view(BLOCKS, -1, len(MARKS))[:, :num_layers]
    at_BLM = at_BLM.cpu()
    found: dict[str, dict[str, list[int]]] = {}
    for first, kind in enumerate(CASES.ALTERNATING):
        layers = list(range(4 + first, num_layers - 1, 2))  # the first ones begin beside the launch
        following = [i + 1 for i in layers]
        marks = {}
        for m, name in enumerate(MARKS):
            if m > 0:
                here, before = at_BLM[:, layers, m], at_BLM[:, layers, m - 1]
                # QkvThere is a mark of the blocks that attend only.
                marks[name] = _summary((here - before)[(here > 0) & (before > 0)])
        marks["next"] = _summary((at_BLM[:, following, 0] - at_BLM[:, layers, -1]).flatten())
        found[kind] = marks
    return found


def _summary(values: torch.Tensor) -> list[int]:
    return [int(values.median()), int(values.min()), int(values.max())]


def main() -> int:
    """Time, print, append lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["20b"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192, 32000])
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument(
        "--define", action="append", default=[], help="a word that the kernel is built with"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="written to every line")
    arguments = parser.parse_args()
    defines = (*arguments.define, *(("ROSE_TIMELINE",) if arguments.timeline else ()))
    if defines:
        library = CudaLibrary(cuda_impl.LIBRARY.source, defines=defines)
        cuda_impl.LAUNCHERS = cuda_impl.StackLaunchers(library)
    origin = {
        "bench": "kernel",
        "device": torch.cuda.get_device_name(),
        "commit": arguments.commit,
        "command": shlex.join(["python", *sys.argv]),
    }
    for size in arguments.size:
        num_layers = SIZES[size][1]
        for context in arguments.contexts:
            call: dict[str, Any] = {}  # one model at a time
            call = call_of(size, context)
            cell = {"size": size, "layers": num_layers, "batch": 1, "context": context}
            if arguments.timeline:
                for kind, marks in timeline(call).items():
                    print(f"{size} {context} {kind}: ns since the mark before: median, least, most")
                    for name, numbers in marks.items():
                        print(f"  {name:16}" + "".join(f"{n:8}" for n in numbers))
                    line = {"op": "timeline", **cell, "kind": kind, "marks": marks}
                    append(arguments.json, {**line, **origin})
                continue
            us = time_of(call)
            print(f"{size} {context}: {us:.0f} us, {us / num_layers:.1f} a layer", flush=True)
            line = {"op": "layers", **cell, "us": us, "us_per_layer": us / num_layers}
            append(arguments.json, {**line, **origin})
    return 0


if __name__ == "__main__":
    sys.exit(main())
