"""The memory plan in words: its table, and the refusals, each with what was asked, found and needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rose.cache.layout import CacheLayout
from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig
from rose.utils.device import DeviceFacts
from rose.utils.math import ceil_div

if TYPE_CHECKING:
    from rose.runtime.memory import MemoryPlan, MemoryUse

GIB = 1 << 30


def _weights(config: EngineConfig) -> str:
    activations = config.quant.activations
    experts, dense = config.quant.weights, config.quant.projections
    also = "" if dense is None else f", projections and head in {dense}"
    text = f"experts in {experts}{also}, relayouts included"
    # What a file holds in 4 bits a number then takes 32: somebody would look for the difference.
    return text if activations == "bf16" else f"{text}: copies in {activations} for a CPU's kernels"


def table(
    plan: MemoryPlan,
    layout: CacheLayout,
    config: EngineConfig,
    device: DeviceFacts,
    *,
    context_tokens: int,
    free_bytes: int | None = None,
) -> Iterator[str]:
    """Yield the lines of the start-up table; what nothing is known of is not told."""
    use, scheduler = plan.use, config.scheduler
    free = "" if free_bytes is None else f", {_size(free_bytes).strip()} free"
    yield f"device      {_size(device.memory_bytes)}  {device.name}{free}"
    rows = (
        ("weights", use.weights, _weights(config)),
        (
            "workspace",
            use.workspace,
            f"of the largest step: {scheduler.step_tokens} tokens, {scheduler.max_sequences} of them sampled from",
        ),
        ("graphs", use.graphs, f"decode steps of up to {scheduler.max_sequences} sequences"),
        ("tables", use.tables, "of sequences and positions"),
    )
    for name, num_bytes, what in rows:
        if num_bytes or name == "weights":
            yield f"{name:<11} {_size(num_bytes)}  {what}"
    yield f"KV          {_size(plan.kv_bytes)}  {plan.kv_tokens} tokens in {config.quant.kv}"
    for kind in layout.kinds:
        yield (
            f"  {kind.kind:<9} {plan.num_pages[kind.kind]:8d} pages of {layout.page_tokens} tokens, "
            f"{kind.page_bytes / (1 << 20):.3f} MiB each in {len(kind.layers)} layers"
        )
    if free_bytes is not None:
        yield f"left        {_size(free_bytes - plan.total)}  of what is free"
    elif device.memory_bytes:
        yield f"left        {_size(device.memory_bytes - plan.total)}  of the device"
    if plan.context_tokens < context_tokens:
        yield (
            f"longest sequence {plan.context_tokens} tokens: the model takes {context_tokens}, "
            "the KV cache is smaller"
        )


def too_few_pages(
    plan: MemoryPlan, layout: CacheLayout, cache: CacheConfig, wanted: int
) -> str | None:
    """Return why the KV cache cannot hold one sequence of `wanted` tokens, or None."""
    if plan.kv_tokens >= wanted:
        return None
    if plan.budget_bytes is None:
        return (
            f"kv_tokens={cache.kv_tokens} holds {plan.kv_tokens} tokens, a sequence of {wanted} is to fit; "
            "raise cache.kv_tokens or lower context_tokens"
        )
    page = sum(k.page_bytes for k in layout.kinds)
    needed = ceil_div(wanted, layout.page_tokens) * page
    return (
        f"the KV cache for {wanted} tokens needs {needed / GIB:.2f} GiB; of {plan.budget_bytes / GIB:.2f} GiB "
        f"(device memory x memory_fraction {cache.memory_fraction}) {_taken(plan.use)}, which leaves room for "
        f"{plan.kv_tokens} tokens; raise cache.memory_fraction, or lower context_tokens or scheduler.max_step_tokens"
    )


def too_large(plan: MemoryPlan, cache: CacheConfig, device_bytes: int) -> str | None:
    """Return why a KV cache of a given size passes the device, or None; 0 bytes: not known."""
    if not device_bytes or plan.total <= device_bytes:
        return None
    return (
        f"kv_tokens={cache.kv_tokens} needs {plan.kv_bytes / GIB:.2f} GiB; the device has "
        f"{device_bytes / GIB:.2f} GiB, of which {_taken(plan.use)}; lower cache.kv_tokens"
    )


def not_free(
    plan: MemoryPlan, cache: CacheConfig, device_bytes: int, free_bytes: int | None
) -> str | None:
    """Return why the plan does not fit beside what else is on the device, or None."""
    if free_bytes is None or plan.total <= free_bytes:
        return None
    option = "kv_tokens" if plan.budget_bytes is None else "memory_fraction"
    asked = f"{option}={getattr(cache, option)}"
    return (
        f"{asked} makes a plan of {plan.total / GIB:.2f} GiB ({_taken(plan.use)}, KV takes "
        f"{plan.kv_bytes / GIB:.2f}); of the device's {device_bytes / GIB:.2f} GiB only {free_bytes / GIB:.2f} are "
        f"free; end what holds the rest, or lower cache.{option}"
    )


PLAN_MARGIN = 0.05
"""Share of what was planned besides KV by which the measured sum may pass it. By default a tenth of the device is
outside the plan, so that much more still fits."""


def is_as_planned(planned: MemoryUse, measured: MemoryUse) -> bool:
    """Whether what is in use after loading stays within the margin of what was planned."""
    return measured.total <= planned.total * (1 + PLAN_MARGIN)


def outcome(planned: MemoryUse, measured: MemoryUse) -> str:
    """Return what was planned beside what was found; parts that were not measured are left out."""
    parts = [("weights", planned.weights, measured.weights)]
    if measured.workspace:
        # A device's allocator tells what all tensors take, and the most that a step took.
        parts = [
            ("weights and tables", planned.weights + planned.tables, measured.weights),
            ("workspace", planned.workspace, measured.workspace),
        ]
    told = ", ".join(
        f"{n} {_size(found).strip()} (planned {_size(plan).strip()})"
        for n, plan, found in parts
        if found
    )
    return f"memory after loading: {told}"


def _taken(use: MemoryUse) -> str:
    parts = (("workspace", use.workspace), ("graphs", use.graphs), ("tables", use.tables))
    more = "".join(f", {name} {size / GIB:.2f}" for name, size in parts)
    return f"weights take {use.weights / GIB:.2f}{more} GiB"


def _size(num_bytes: int) -> str:
    """In GiB, or in MiB where that would show as nearly nothing."""
    if abs(num_bytes) < GIB // 10:
        return f"{num_bytes / (1 << 20):8.2f} MiB"
    return f"{num_bytes / GIB:8.2f} GiB"
