"""Penalties, biases and min_tokens against their definitions; log-probabilities against log_softmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.protocol.sampling_params import MAX_BANNED, MAX_BIASES, MAX_TOP_LOGPROBS, SamplingParams
from rose.sampling import reference
from rose.sampling.adjustments import AdjustmentTable
from rose.sampling.batch import SampleFlavour, SlotFlavours
from rose.sampling.logprobs import logprobs
from rose.sampling.transforms import TRANSFORMS, adjusted

V = 30
CPU = torch.device("cpu")
CLOSE = 1e-4
"""float32 against float64, of logits up to 20 that penalties up to 10 scale and up to 8 counts of 2 shift: a few
hundred times 2^-24."""

ids = st.integers(0, V - 1)
params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 10.0]),
    frequency_penalty=st.sampled_from([0.0, -2.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -0.5, 2.0]),
    logit_bias=st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=5),
    min_tokens=st.integers(0, 6),
)
cases = st.tuples(
    params,
    st.lists(ids, min_size=1, max_size=8),
    st.lists(ids, max_size=8),
    st.lists(ids, max_size=3),
)


def _rows(table, slots, cases):
    positions = [len(prompt) + len(output) for _, prompt, output, _ in cases]
    return table.gather(torch.tensor(slots), torch.tensor(positions))


@settings(max_examples=150, deadline=None)
@given(st.lists(cases, min_size=1, max_size=4), st.integers(0, 8), st.integers(0, 2**32))
def test_changed_logits_are_those_of_the_definitions_however_the_output_was_counted(
    rows, num_known, seed
):
    """Some output is known when the slot is written (after a preemption), the rest is counted step by step."""
    table = AdjustmentTable(6, V, CPU)
    table.counts_RV.fill_(7)  # left by earlier sequences
    slots = [(3 * i + 1) % 5 for i in range(len(rows))]
    for slot, (sampling, prompt, output, stops) in zip(slots, rows, strict=True):
        known = output[:num_known]
        table.write(slot, sampling, prompt_ids=prompt, output_ids=known, stop_ids=stops)
        for token in output[num_known:]:
            table.count(torch.tensor([slot, 5, 5]), torch.tensor([token, 1, 1]))
    logits_SV = torch.randn(len(rows), V, generator=torch.Generator().manual_seed(seed)) * 5
    before_SV = logits_SV.clone()
    found_SV = adjusted(logits_SV, _rows(table, slots, rows))
    assert torch.equal(logits_SV, before_SV)
    for i, (sampling, prompt, output, stops) in enumerate(rows):
        expected_V = torch.tensor(
            reference.adjusted(
                logits_SV[i].tolist(),
                sampling,
                prompt_ids=prompt,
                output_ids=output,
                stop_ids=stops,
            )
        )
        torch.testing.assert_close(found_SV[i], expected_V, rtol=CLOSE, atol=CLOSE)


def test_rows_of_slots_that_change_nothing_keep_every_bit():
    table = AdjustmentTable(3, V, CPU)
    heavy = SamplingParams(
        repetition_penalty=3.0, presence_penalty=1.0, logit_bias={2: 50.0}, min_tokens=9
    )
    for slot in (0, 1):
        table.write(slot, heavy, prompt_ids=[1, 2], output_ids=[2, 2], stop_ids=[3])
    table.reset(1)
    logits_SV = torch.randn(3, V) * 10
    logits_SV[:, 5] = float("-inf")
    rows = table.gather(torch.arange(3), torch.tensor([4, 4, 4]))
    found_SV = adjusted(logits_SV, rows)
    assert torch.equal(found_SV[1:], logits_SV[1:])
    assert not torch.equal(found_SV[0], logits_SV[0])


def test_bias_alone_does_not_look_back():
    table = AdjustmentTable(1, V, CPU)
    table.counts_RV.fill_(9)
    sampling = SamplingParams(logit_bias={4: 1.5})
    table.write(0, sampling, prompt_ids=[4], output_ids=[], stop_ids=[7])
    found_SV = adjusted(torch.zeros(1, V), table.gather(torch.tensor([0]), torch.tensor([1])))
    assert found_SV[0, 4] == 1.5
    assert found_SV.count_nonzero() == 1


def test_as_many_biases_and_stop_tokens_fit_as_are_allowed():
    size = MAX_BIASES + MAX_BANNED
    table = AdjustmentTable(1, size, CPU)
    bias = {i: 1.0 for i in range(MAX_BIASES)}
    sampling = SamplingParams(logit_bias=bias, min_tokens=1)
    assert not sampling.problems()
    stops = list(range(MAX_BIASES, size))
    table.write(0, sampling, prompt_ids=[0], output_ids=[], stop_ids=stops)
    found_SV = adjusted(torch.zeros(1, size), table.gather(torch.tensor([0]), torch.tensor([1])))
    assert (found_SV[0, :MAX_BIASES] == 1).all()
    assert found_SV[0, MAX_BIASES:].isneginf().all()


def test_transforms_are_named_in_the_order_of_the_documentation():
    names = " ".join(name for name, _ in TRANSFORMS)
    order = ["repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias"]
    assert sorted(order, key=names.index) == order


@pytest.mark.parametrize("vocab", [5, 30])
def test_logprobs_are_those_of_log_softmax(vocab):
    logits_SV = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1)) * 4
    tokens_S = torch.tensor([0, 3, 4, 2])
    found = logprobs(logits_SV, tokens_S)
    expected_SV = logits_SV.double().log_softmax(dim=-1).float()
    chosen_S = expected_SV[torch.arange(4), tokens_S]
    torch.testing.assert_close(found.chosen_S, chosen_S, rtol=CLOSE, atol=CLOSE)
    top = expected_SV.sort(dim=-1, descending=True)
    num_top = min(MAX_TOP_LOGPROBS, vocab)
    torch.testing.assert_close(found.top_SK, top.values[:, :num_top], rtol=CLOSE, atol=CLOSE)
    assert torch.equal(found.top_ids_SK, top.indices[:, :num_top])


@pytest.mark.parametrize(
    "wrong",
    [
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("nan")},
        {"frequency_penalty": 2.1},
        {"presence_penalty": float("nan")},
        {"logit_bias": {3: 101.0}},
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": {-1: 0.0}},
        {"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1.0)},
        {"min_tokens": -1},
        {"logprobs": 21},
        {"logprobs": -1},
    ],
    ids=str,
)
def test_values_out_of_range_are_named(wrong):
    [problem] = SamplingParams(**wrong).problems()
    assert problem.startswith(next(iter(wrong)))
    assert "allowed:" in problem


def test_a_step_is_extended_only_while_a_slot_of_it_asks_for_it():
    flavours = SlotFlavours()
    flavours.take(0, SamplingParams())
    flavours.take(1, SamplingParams(logprobs=0))
    flavours.take(2, SamplingParams(min_tokens=1, top_k=2))
    assert flavours.of([0]) == SampleFlavour(False, False)
    assert flavours.of([0, 1]) == SampleFlavour(False, True)
    assert flavours.of([2]) == SampleFlavour(True, True)
    assert (flavours.logprobs, flavours.adjusted) == ({1: 0}, {2})
    for slot in (1, 2):
        flavours.take(slot, SamplingParams())
    assert flavours.of([0, 1, 2]) == SampleFlavour(False, False)
    assert (flavours.logprobs, flavours.adjusted) == ({}, set())
