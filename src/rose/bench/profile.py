"""Where the time of one cell goes: a trace for a viewer, and a table per kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MAX_ROWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """All calls of one kernel (on a CPU: of one torch operator, without what it calls)."""

    name: str
    calls: int
    total_us: float
    share: float
    """Of the time of all kernels."""


@contextmanager
def traced(folder: Path, name: str) -> Iterator[None]:
    """Profile what runs inside; write `name.json` (chrome trace) and `name.txt` (table) to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    is_cuda = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        yield
        if is_cuda:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(folder / f"{name}.json"))
    (folder / f"{name}.txt").write_text(text(kernel_times(profiler)))


def kernel_times(profiler: Any) -> list[KernelTime]:
    """Return the kernels of a profile, the costliest first; without a CUDA device, torch's operators."""
    rows = profiler.key_averages()
    kernels = [r for r in rows if r.device_type.name == "CUDA"]
    if kernels:
        times = [(r.key, r.count, r.self_device_time_total) for r in kernels]
    else:
        times = [(r.key, r.count, r.self_cpu_time_total) for r in rows]
    whole = sum(t for _, _, t in times) or 1.0
    found = [KernelTime(name=n, calls=c, total_us=t, share=t / whole) for n, c, t in times if t > 0]
    return sorted(found, key=lambda k: -k.total_us)


def text(kernels: list[KernelTime]) -> str:
    """Return the table in plain text."""
    lines = [f"{'time ms':>10} {'share':>7} {'calls':>7} {'mean us':>9}  kernel"]
    for k in kernels[:MAX_ROWS]:
        mean = k.total_us / k.calls
        lines.append(
            f"{k.total_us / 1e3:10.3f} {k.share:7.1%} {k.calls:7d} {mean:9.1f}  {k.name[:100]}"
        )
    rest = kernels[MAX_ROWS:]
    if rest:
        total = sum(k.total_us for k in rest)
        lines.append(
            f"{total / 1e3:10.3f} {sum(k.share for k in rest):7.1%} {sum(k.calls for k in rest):7d} "
            f"{'':9}  {len(rest)} more"
        )
    lines.append(f"{sum(k.total_us for k in kernels) / 1e3:10.3f}  all kernels, one after another")
    return "\n".join(lines) + "\n"
