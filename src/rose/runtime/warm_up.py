"""Made-up steps that make a device compile and load what serving will run. Knows no decoder.

A kernel is compiled for ranges of rows, for flags and for launch shapes. Whatever no step here needs is compiled while
every running sequence waits for it, so these visit all of them: tests/runtime/test_kernels_at_hand.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from rose.cache.layout import CacheLayout
from rose.protocol.sampling_params import SamplingParams
from rose.runtime.plan import PlanEntry, StepPlan
from rose.utils.math import ceil_div

PROMPT_TOKENS = (1, 16, 100, 512, 1024, 2048, 4096)
"""Kernels are specialised by ranges of rows; these lie in the different ones. cuBLAS chooses among its own by rows, and
loads one at its first use."""
DECODE_ROWS = (1, 2, 4, 8, 15, 16, 24, 32, 40, 64, 72, 128)
"""Attention has a kernel for each power of two; products one for whole sixteens and one for other numbers."""


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
    layout: CacheLayout, *, num_pages: int, num_slots: int, max_tokens: int, has_graphs: bool
) -> Iterator[StepPlan]:
    """Yield prompts of several lengths, steps with several numbers of decoding sequences beside a prompt, and decode
    steps alone where no graphs are captured of them.

    Units    num_pages: pages of every kind; pages 0 and on are written, so nothing may be in them yet
    """
    most = min(max_tokens, num_pages * layout.page_tokens - 1)
    if most < 2:
        return
    for num_tokens in sorted({*(n for n in PROMPT_TOKENS if n < most), most}):
        for top_p in (1.0, 0.9):
            sampling = SamplingParams(top_p=top_p, seed=0)
            yield prompt_step(layout, num_tokens, sampling=sampling)
    has_two = num_slots > 1 and num_pages > 1
    # One row less than there are slots, which the prompt beside them takes.
    for num_rows in _up_to(min(num_slots, max_tokens) - 1) if has_two else []:
        num_tokens = min(max_tokens - num_rows, layout.page_tokens - 1)
        beside = prompt_step(layout, num_tokens, slot=num_rows, first_page=1)
        yield _with_decode(layout, num_rows, beside)
    if has_graphs:
        return
    # Pages and lengths of slots are those of the steps before; where these were prompts alone, of one short prompt.
    if not has_two:
        yield prompt_step(layout, 1)
    for num_rows in _up_to(min(num_slots, max_tokens) if has_two else 1):
        yield _decode_step(num_rows, max_length=layout.page_tokens)


def _up_to(most: int) -> list[int]:
    return sorted({*(n for n in DECODE_ROWS if n < most), most})


def _with_decode(layout: CacheLayout, num_rows: int, beside: StepPlan) -> StepPlan:
    """Add decoding sequences in the first slots, whose first page, page 0, they all share."""
    step = _decode_step(num_rows, max_length=layout.page_tokens)
    for entry in step.decode:
        entry.new_pages = {kind.kind: [(0, 0)] for kind in layout.kinds}
    step.prefill = beside.prefill
    step.sample_slots += beside.sample_slots
    return step


def _decode_step(num_rows: int, *, max_length: int) -> StepPlan:
    return StepPlan(
        step=-1,
        decode=[PlanEntry.decode(slot, position=1) for slot in range(num_rows)],
        prefill=[],
        sample_slots=list(range(num_rows)),
        max_length=max_length,
    )
