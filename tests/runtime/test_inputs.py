"""What the device's tables hold after steps, padding rows included."""

from __future__ import annotations

import pytest
import torch

from rose.cache.layout import CacheLayout, KindLayout
from rose.protocol.sampling_params import SamplingParams
from rose.runtime.inputs import DeviceTables
from rose.runtime.plan import PlanEntry, StepPlan
from rose.utils.device import CPU

SIZES = {"page_tokens": 4, "num_kv_heads": 1, "head_dim": 2, "element": "float32"}
LAYOUT = CacheLayout(
    kinds=(
        KindLayout(kind="full", layers=(1,), window_tokens=None, **SIZES),
        KindLayout(kind="window", layers=(0,), window_tokens=6, **SIZES),
    ),
    page_tokens=4,
)


@pytest.fixture
def tables():
    return DeviceTables(
        LAYOUT, num_slots=4, context_tokens=32, max_step_tokens=16, vocab_size=50, device=CPU
    )


def _prefill(slot, tokens, pages, *, start=0, is_last=True, sampling=None):
    columns = list(enumerate(pages, start=start // 4))
    return PlanEntry(
        slot=slot,
        is_new=start == 0,
        start_position=start,
        token_ids=tokens,
        num_tokens=len(tokens),
        is_last_chunk=is_last,
        new_pages={"full": columns, "window": [(c, p + 50) for c, p in columns]},
        sampling=sampling or SamplingParams(seed=slot),
    )


def _decode(slot, position, **new_pages):
    return PlanEntry(
        slot=slot,
        is_new=False,
        start_position=position,
        token_ids=None,
        num_tokens=1,
        is_last_chunk=True,
        new_pages=new_pages,
    )


def _plan(decode=(), prefill=()):
    entries = [*decode, *prefill]
    return StepPlan(
        step=0,
        decode=list(decode),
        prefill=list(prefill),
        sample_slots=[e.slot for e in entries if e.is_last_chunk],
        max_length=max(e.start_position + e.num_tokens for e in entries),
    )


def test_a_row_that_had_no_token_is_computed_as_token_0(tables):
    tables.mixed_inputs(_plan(prefill=[_prefill(2, [7, 8, 9], [5])]), [])
    tables.keep_tokens(torch.tensor([2]), torch.tensor([-1]))
    inputs = tables.mixed_inputs(_plan([_decode(2, 3)], [_prefill(0, [1, 6], [8])]), [])
    assert inputs.token_ids_T.tolist() == [0, 1, 6]


def test_a_mixed_step_becomes_rows_of_tokens_decoding_ones_first(tables):
    tables.mixed_inputs(_plan(prefill=[_prefill(2, [7, 8, 9], [5])]), [])
    tables.keep_tokens(torch.tensor([2]), torch.tensor([42]))
    inputs = tables.mixed_inputs(
        _plan(
            [_decode(2, 3)], [_prefill(0, [1] * 5, [8, 9]), _prefill(1, [3], [4], is_last=False)]
        ),
        [],
    )
    assert inputs.token_ids_T.tolist() == [42, 1, 1, 1, 1, 1, 3]
    context = inputs.context
    assert context.positions_T.tolist() == [3, 0, 1, 2, 3, 4, 0]
    assert context.lengths_S.tolist() == [4, 5, 1]
    assert context.query_starts_N1.tolist() == [0, 5, 6]
    assert (context.num_decode, context.max_query_tokens, context.phase) == (1, 5, "prefill")
    assert context.sampled.rows_M.tolist() == [0, 5]
    assert context.sampled.sequences_M.tolist() == [0, 1]
    assert inputs.positions_S.tolist() == [4, 5]
    full, window = context.kinds["full"], context.kinds["window"]
    assert full.slots_T.tolist() == [5 * 4 + 3, 32, 33, 34, 35, 36, 16]
    assert window.slots_T.tolist() == [55 * 4 + 3, 232, 233, 234, 235, 236, 216]
    assert full.page_table_SP[:2].tolist() == [[5, -1], [8, 9]]


def test_decode_steps_advance_from_what_the_device_knows(tables):
    tables.mixed_inputs(_plan(prefill=[_prefill(3, [7, 8, 9], [5])]), [])
    tables.keep_tokens(torch.tensor([3]), torch.tensor([11]))
    for position, pages in ((3, {}), (4, {"full": [(1, 6)], "window": [(1, 56)]})):
        plan = _plan([_decode(3, position, **pages)])
        tables.send_decode(plan, 4)
        inputs = tables.decode_inputs(4, 32, [])
        assert inputs.token_ids_T.tolist() == [11, 0, 0, 0]
        assert inputs.context.lengths_S.tolist() == [position + 1, 0, 0, 0]
        assert inputs.context.positions_T.tolist() == [position, 0, 0, 0]
        assert inputs.context.kinds["full"].slots_T[1:].tolist() == [-1, -1, -1]
        tables.keep_tokens(inputs.slots_S, torch.tensor([11, 99, 98, 97]))
    assert inputs.context.kinds["window"].slots_T[0] == 56 * 4
    assert inputs.context.kinds["full"].page_table_SP[0].tolist()[:3] == [5, 6, -1]
    assert tables.lengths_R.tolist() == [0, 0, 0, 5, 0]


def test_sampling_parameters_reach_the_rows_of_their_slots(tables):
    mine = SamplingParams(temperature=0.25, top_p=0.5, top_k=2**40, min_p=0.125, seed=-5)
    tables.mixed_inputs(
        _plan(prefill=[_prefill(1, [1], [0], sampling=mine), _prefill(2, [1], [1])]), []
    )
    tables.send_decode(_plan([_decode(2, 1), _decode(1, 1)]), 2)
    sampling = tables.decode_inputs(2, 32, []).sampling
    assert sampling.temperature_S.tolist() == [1.0, 0.25]
    assert sampling.top_p_S.tolist() == [1.0, 0.5]
    assert sampling.min_p_S.tolist() == [0.0, 0.125]
    assert sampling.top_k_S.tolist() == [0, 2**31 - 1]
    assert sampling.seed_S.tolist() == [2, -5]


def test_the_largest_step_fits_the_staging_buffer(tables):
    entries = [_prefill(s, [1] * 4, [s], is_last=True) for s in range(4)]
    assert tables.mixed_inputs(_plan(prefill=entries), []).token_ids_T.shape == (16,)
