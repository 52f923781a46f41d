"""Time implementations over their cases: rotated inputs, medians, share of the machine's limit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rose.kernels import registry
from rose.kernels.cases import Case
from rose.kernels.check import (
    Draw,
    cases_module,
    check_case,
    clone,
    is_runnable,
    require_names,
)
from rose.kernels.registry import Implementation, Operation
from rose.utils.device import DeviceFacts

_L2_BYTES = 60 << 20
_REPLAYS = 15


def time_case(
    operation: Operation,
    implementation: Implementation,
    case: Case,
    device: DeviceFacts,
    *,
    draw: Draw | None = None,
) -> dict[str, Any]:
    """Time one implementation on one case and return a JSON-ready line; `draw` saves drawing inputs.

    On CUDA a graph of many calls over rotated inputs (more than twice the L2 cache in all) is replayed, so
    that neither launch gaps of Python nor warm caches count; `warm_us` repeats one input instead. What no
    graph can hold is timed call by call, launch gaps included.
    """
    module = cases_module(operation.name)
    base = module.inputs(case, 0, device.kind) if draw is None else draw.fresh()
    if implementation.prepare is not None:
        base["weights"] = implementation.prepare(base["weights"])
    work_bytes, flops = module.num_bytes(case), module.flops(case)
    if device.kind == "cuda":
        num_copies = int(min(max(1, 2 * _L2_BYTES // max(1, work_bytes) + 1), 16))
        copies = [base, *(_clone_activations(base) for _ in range(num_copies - 1))]
        if hasattr(module, "rotated"):
            copies = [module.rotated(case, arguments, i) for i, arguments in enumerate(copies)]
        sample = _graph_samples if implementation.is_capturable else _event_samples
        samples = sample(implementation.function, copies)
        warm = statistics.median(sample(implementation.function, copies[:1]))
    else:
        samples = _host_samples(implementation.function, base)
        warm = statistics.median(samples)
    median_us = statistics.median(samples)
    line: dict[str, Any] = {
        "bench": "kernel",
        "operation": operation.name,
        "implementation": implementation.name,
        "case": case.name,
        "median_us": round(median_us, 3),
        "p10_us": round(sorted(samples)[len(samples) // 10], 3),
        "p90_us": round(sorted(samples)[-1 - len(samples) // 10], 3),
        "warm_us": round(warm, 3),
        "flops": flops,
        "bytes": work_bytes,
        "tflops": round(flops / median_us / 1e6, 2),
        "tb_per_s": round(work_bytes / median_us / 1e6, 4),
    }
    peak = (
        device.fp8_flops_per_s
        if "fp8" in case.formats.get("weight", "")
        else device.bf16_flops_per_s
    )
    if device.bandwidth_bytes_per_s and peak:
        floor_us = max(flops / peak, work_bytes / device.bandwidth_bytes_per_s) * 1e6
        line["floor_us"] = round(floor_us, 3)
        line["share_of_limit"] = round(floor_us / median_us, 4)
    return line


def _clone_activations(arguments: dict[str, Any]) -> dict[str, Any]:
    """Copy the arguments; weights of more than the L2 cache are shared: a call evicts it, or `rotated` does."""
    weights = arguments.get("weights")
    if weights is not None and weights.num_bytes > _L2_BYTES:
        rest = clone({k: v for k, v in arguments.items() if k != "weights"})
        return {**rest, "weights": weights}
    return clone(arguments)


def _graph_samples(call: Callable[..., None], copies: list[dict[str, Any]]) -> list[float]:
    """Return microseconds per call of `_REPLAYS` graph replays."""
    for arguments in copies[:2]:
        call(**arguments)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call(**copies[0])
    end.record()
    torch.cuda.synchronize()
    calls = int(min(max(len(copies), 2e3 / max(start.elapsed_time(end) * 1e3, 1.0)), 64))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(**copies[i % len(copies)])
    graph.replay()
    samples = []
    for _ in range(_REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / calls)
    return samples


def _event_samples(call: Callable[..., None], copies: list[dict[str, Any]]) -> list[float]:
    """Return microseconds of single calls, between two events."""
    call(**copies[0])
    samples = []
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for i in range(_REPLAYS):
        start.record()
        call(**copies[i % len(copies)])
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3)
    return samples


def _host_samples(call: Callable[..., None], arguments: dict[str, Any]) -> list[float]:
    samples = []
    call(**arguments)
    for _ in range(5):
        begin = time.perf_counter()
        call(**arguments)
        samples.append((time.perf_counter() - begin) * 1e6)
    return samples


def bench_all(
    device: DeviceFacts,
    *,
    operations: list[str] | None = None,
    only: str | None = None,
    case_name: str | None = None,
    untimed: Callable[[str, str], None] = lambda _operation, _why: None,
) -> Iterator[dict[str, Any]]:
    """Check, then time, every implementation over its timed cases; one JSON-ready line each.

    `untimed` is called for each operation that has no line, with the reasons.

    Raises  ContractError for a name that is not known
    """
    names = operations or registry.operation_names()
    require_names(names, implementation=only, case=case_name)
    for name in names:
        operation, num_lines = registry.load(name), 0
        refused: dict[str, None] = {}
        for case in cases_module(name).CASES:
            if not case.timed or case_name not in (None, case.name):
                continue
            draw: Draw | None = None
            for implementation in registry.implementations(name):
                if implementation.name == "reference" or only not in (None, implementation.name):
                    continue
                reason = is_runnable(implementation, case, device)
                if reason is not None:
                    refused[f"{implementation.name}: {reason}"] = None
                    continue
                num_lines += 1
                head = {"operation": name, "implementation": implementation.name, "case": case.name}
                try:
                    draw = draw or Draw(operation, case, 1, device)
                    outcome = check_case(operation, implementation, case, device, 1, draw=draw)
                    if outcome.status != "ok":
                        yield {
                            "bench": "kernel",
                            **head,
                            "error": f"wrong result: {outcome.detail}",
                        }
                        continue
                    yield time_case(operation, implementation, case, device, draw=draw)
                except Exception as error:  # noqa: BLE001 - one broken kernel must not hide the others
                    yield {"bench": "kernel", **head, "error": f"{type(error).__name__}: {error}"}
        if not num_lines:
            untimed(name, "; ".join(refused) or "no case that is timed")
