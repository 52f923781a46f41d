"""Made-up steps that make a device compile and load what serving will run. Knows no decoder."""

from __future__ import annotations

from collections.abc import Iterator

from rose.cache.layout import CacheLayout
from rose.protocol.sampling_params import SamplingParams
from rose.runtime.plan import PlanEntry, StepPlan
from rose.utils.math import ceil_div

PROMPT_TOKENS = (1, 16, 100, 512, 2048)
"""Kernels are specialised by ranges of rows; these lie in the different ones."""


def prompt_step(
    layout: CacheLayout,
    num_tokens: int,
    *,
    slot: int = 0,
    first_page: int = 0,
    sampling: SamplingParams | None = None,
) -> StepPlan:
    """Return a step with one whole prompt of zeros, on pages from `first_page` on; room for one more token."""
    num_pages = ceil_div(num_tokens + 1, layout.page_tokens)
    columns = list(enumerate(range(first_page, first_page + num_pages)))
    entry = PlanEntry(
        slot=slot,
        is_new=True,
        start_position=0,
        token_ids=[0] * num_tokens,
        num_tokens=num_tokens,
        is_last_chunk=True,
        new_pages={k.kind: columns for k in layout.kinds},
        sampling=sampling or SamplingParams(seed=0),
    )
    return StepPlan(step=-1, decode=[], prefill=[entry], sample_slots=[slot], max_length=num_tokens)


def warm_up_steps(
    layout: CacheLayout, *, num_pages: int, num_slots: int, max_tokens: int
) -> Iterator[StepPlan]:
    """Yield prompts of several lengths, one step with a decoding sequence beside a prompt, and a decode step.

    Units    num_pages: pages of every kind; pages 0 and on are written, so nothing may be in them yet
    """
    most = min(max_tokens, num_pages * layout.page_tokens - 1)
    if most < 2:
        return
    for num_tokens in sorted({*(n for n in PROMPT_TOKENS if n < most), most}):
        for top_p in (1.0, 0.9):
            sampling = SamplingParams(top_p=top_p, seed=0)
            yield prompt_step(layout, num_tokens, sampling=sampling)
    if num_slots < 2 or num_pages < 2:
        return
    yield prompt_step(layout, 1)
    beside = prompt_step(layout, min(max_tokens - 1, layout.page_tokens - 1), slot=1, first_page=1)
    for prefill in (beside.prefill, []):
        yield StepPlan(
            step=-1,
            decode=[PlanEntry.decode(0, position=1)],
            prefill=prefill,
            sample_slots=[0] + [1] * len(prefill),
            max_length=layout.page_tokens,
        )
