"""Who gets which part of the device's memory: pure arithmetic, printed, checked, refused with numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rose.cache.layout import CacheLayout
from rose.config.cache import CacheConfig
from rose.config.scheduler import SchedulerConfig
from rose.utils.errors import ConfigError
from rose.utils.math import ceil_div

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that are spoken for before the KV cache."""

    weights: int = 0
    workspace: int = 0
    """Peak of the largest step, above the weights."""
    graphs: int = 0
    """Decode graphs with their logits."""

    @property
    def total(self) -> int:
        """Sum of all."""
        return self.weights + self.workspace + self.graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What the KV cache gets, and what that means."""

    num_pages: dict[str, int]
    kv_tokens: int
    """Tokens that full-attention layers hold."""
    kv_bytes: int
    context_tokens: int
    """Longest sequence: the configured or the model's limit, or what KV can hold."""
    use: MemoryUse
    budget_bytes: int | None
    """Device memory times memory_fraction; None where KV is set by kv_tokens."""
    lines: tuple[str, ...]
    """The plan in words."""


def graph_bytes(max_rows: int, vocab_size: int) -> int:
    """Estimate what decode graphs hold: float32 logits five times (head, sampler; and where a row has penalties,
    changed logits, counts and factors) and a margin.

    The margin of 256 MiB is a guess for the workspace of one step at `max_rows`; what they really took is
    printed after capture.
    """
    return 5 * 4 * max_rows * vocab_size + 256 * (1 << 20)


CACHED_PAGES_PER_WINDOW_PAGE = 32
"""With the prefix cache: so many full-attention pages have one window page more. A prefix can be continued where its
last two window pages (pages of 64, window of 128) are there, so prefixes of 64 pages on average all can (guessed)."""


def window_pages(
    layout: CacheLayout, scheduler: SchedulerConfig, full_pages: int, *, is_caching: bool = False
) -> int:
    """Return the pages of the window kind: enough that full-attention pages run out first.

    A decoding sequence holds the pages that its window touches; chunks of a step add theirs until the next
    step. No sequence holds more pages here than in the full kind.
    """
    window = next(k for k in layout.kinds if k.window_tokens is not None)
    per_sequence = window.most_pages(1 << 40, 1)
    chunks = ceil_div(scheduler.max_step_tokens, layout.page_tokens) + scheduler.max_sequences
    cached = full_pages // CACHED_PAGES_PER_WINDOW_PAGE if is_caching else 0
    return min(full_pages, scheduler.max_sequences * per_sequence + chunks + cached)


def plan_memory(
    *,
    layout: CacheLayout,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    use: MemoryUse,
    device_bytes: int,
    context_tokens: int,
    is_context_asked: bool,
) -> MemoryPlan:
    """Divide the device; the KV cache takes what is left, or what `kv_tokens` says.

    Units    is_context_asked: the limit was configured, so it may not be lowered to what fits
    Raises   ConfigError with the numbers where too little is left
    """
    full = next((k for k in layout.kinds if k.window_tokens is None), None)
    window = next((k for k in layout.kinds if k.window_tokens is not None), None)
    budget = None if cache.kv_tokens is not None else int(device_bytes * cache.memory_fraction)
    if budget is None:
        full_pages = ceil_div(cache.kv_tokens or 0, layout.page_tokens)
    else:
        full_pages = _pages_for_bytes(
            layout, scheduler, budget - use.total, context_tokens, is_caching=cache.prefix_cache
        )
    num_pages = {} if full is None else {full.kind: full_pages}
    if window is not None:
        num_pages[window.kind] = window_pages(
            layout, scheduler, full_pages, is_caching=cache.prefix_cache
        )
    kv_bytes = sum(k.page_bytes * num_pages[k.kind] for k in layout.kinds)
    kv_tokens = full_pages * layout.page_tokens
    if device_bytes and use.total + kv_bytes > device_bytes:
        raise ConfigError(
            f"kv_tokens={cache.kv_tokens} needs {kv_bytes / GIB:.2f} GiB; the device has "
            f"{device_bytes / GIB:.2f} GiB, of which {use.total / GIB:.2f} are taken; lower cache.kv_tokens"
        )
    wanted = context_tokens if is_context_asked else 2 * layout.page_tokens
    if kv_tokens < min(wanted, context_tokens):
        raise ConfigError(_refusal(layout, cache, use, budget, kv_tokens, wanted))
    plan = MemoryPlan(
        num_pages=num_pages,
        kv_tokens=kv_tokens,
        kv_bytes=kv_bytes,
        context_tokens=min(context_tokens, kv_tokens),
        use=use,
        budget_bytes=budget,
        lines=(),
    )
    return _with_lines(plan, layout, device_bytes, context_tokens)


def _pages_for_bytes(
    layout: CacheLayout,
    scheduler: SchedulerConfig,
    num_bytes: int,
    context_tokens: int,
    *,
    is_caching: bool,
) -> int:
    """Return the pages of the full kind, window pages paid for; the largest count that fits."""
    full_bytes = sum(k.page_bytes for k in layout.kinds if k.window_tokens is None)
    window_bytes = sum(k.page_bytes for k in layout.kinds if k.window_tokens is not None)
    # More than every sequence at full length can use would be wasted.
    most = scheduler.max_sequences * ceil_div(context_tokens, layout.page_tokens)
    if not window_bytes:
        return min(most, max(0, num_bytes // full_bytes))
    enough = window_pages(layout, scheduler, most)
    pages = most
    if full_bytes:
        share = CACHED_PAGES_PER_WINDOW_PAGE if is_caching else 0
        # pages x full + (enough + pages / share) x window = bytes, all in whole numbers.
        left = num_bytes - enough * window_bytes
        pages = left * share // (full_bytes * share + window_bytes) if share else left // full_bytes
    if pages < enough:
        # So little memory that both kinds have equally many pages.
        pages = num_bytes // (full_bytes + window_bytes)
    return min(most, max(0, pages))


def _refusal(
    layout: CacheLayout,
    cache: CacheConfig,
    use: MemoryUse,
    budget: int | None,
    kv_tokens: int,
    wanted: int,
) -> str:
    page = sum(k.page_bytes for k in layout.kinds)
    needed = ceil_div(wanted, layout.page_tokens) * page
    if budget is None:
        return (
            f"kv_tokens={cache.kv_tokens} holds {kv_tokens} tokens, a sequence of {wanted} is to fit; "
            "raise cache.kv_tokens or lower context_tokens"
        )
    return (
        f"the KV cache for {wanted} tokens needs {needed / GIB:.2f} GiB; of {budget / GIB:.2f} GiB "
        f"(device memory x memory_fraction {cache.memory_fraction}) weights take {use.weights / GIB:.2f}, "
        f"workspace {use.workspace / GIB:.2f}, graphs {use.graphs / GIB:.2f} GiB, which leaves room for "
        f"{kv_tokens} tokens; raise cache.memory_fraction, or lower context_tokens or "
        "scheduler.max_step_tokens"
    )


def _with_lines(
    plan: MemoryPlan, layout: CacheLayout, device_bytes: int, context_tokens: int
) -> MemoryPlan:
    use = plan.use
    lines = [
        f"device      {_size(device_bytes)}",
        f"weights     {_size(use.weights)}",
        f"KV          {_size(plan.kv_bytes)}, {plan.kv_tokens} tokens",
    ]
    if use.workspace or use.graphs:
        # Measured on CUDA; on a CPU nothing is known of them.
        lines[2:2] = [
            f"workspace   {_size(use.workspace)}",
            f"graphs      {_size(use.graphs)}",
        ]
    lines += [
        f"  {k.kind:<9} {plan.num_pages[k.kind]:8d} pages of {layout.page_tokens} tokens, "
        f"{k.page_bytes / (1 << 20):.3f} MiB each in {len(k.layers)} layers"
        for k in layout.kinds
    ]
    if plan.context_tokens < context_tokens:
        lines.append(
            f"longest sequence {plan.context_tokens} tokens: the model takes {context_tokens}, "
            "the KV cache is smaller"
        )
    return replace(plan, lines=tuple(lines))


def _size(num_bytes: int) -> str:
    """In GiB, or in MiB where that would show as nearly nothing."""
    if num_bytes < GIB // 10:
        return f"{num_bytes / (1 << 20):8.2f} MiB"
    return f"{num_bytes / GIB:8.2f} GiB"
