"""Who gets which part of the device's memory: pure arithmetic, printed, checked, refused with numbers."""

from __future__ import annotations

from dataclasses import dataclass

from rose.cache.layout import CacheLayout
from rose.config.cache import CacheConfig
from rose.config.scheduler import SchedulerConfig
from rose.runtime import memory_words as words
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
    tables: int = 0
    """Per slot: pages, parameters and token counts; and the table of rotary angles."""

    @property
    def total(self) -> int:
        """Sum of all."""
        return self.weights + self.workspace + self.graphs + self.tables


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

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.use.total + self.kv_bytes


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
    chunks = ceil_div(scheduler.step_tokens, layout.page_tokens) + scheduler.max_sequences
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
    free_bytes: int | None = None,
) -> MemoryPlan:
    """Divide the device; the KV cache takes what is left, or what `kv_tokens` says.

    Units    is_context_asked: the limit was configured, so it may not be lowered to what fits;
             free_bytes: of device_bytes, before any of `use` is taken; None: not known, or `use` is taken already
    Raises   ConfigError where too little is left, with what was asked, found and needed
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
    plan = MemoryPlan(
        num_pages=num_pages,
        kv_tokens=full_pages * layout.page_tokens,
        kv_bytes=sum(k.page_bytes * num_pages[k.kind] for k in layout.kinds),
        context_tokens=min(context_tokens, full_pages * layout.page_tokens),
        use=use,
        budget_bytes=budget,
    )
    wanted = min(context_tokens if is_context_asked else 2 * layout.page_tokens, context_tokens)
    problems = (
        words.too_few_pages(plan, layout, cache, wanted),
        words.too_large(plan, cache, device_bytes),
        words.not_free(plan, cache, device_bytes, free_bytes),
    )
    for problem in problems:
        if problem is not None:
            raise ConfigError(problem)
    return plan


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
