"""Parameters survive the way to the device; ids past the vocabulary are never chosen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose.protocol.sampling_params import SamplingParams
from rose.sampling.batch import SamplingTable, is_filtered, pack
from rose.sampling.sampler import Sampler
from rose.utils.device import CPU

EXTREME = (2.0**-149, 2.0**-126, 1e-46, 1e-300, 1e-30, 2.0**-65)
"""What float32 holds as 0, as a number that is not normal, or as one that sends logits past its range."""

params = st.builds(
    SamplingParams,
    temperature=st.just(0.0) | st.floats(2.0**-64, 100, width=32),
    top_p=st.floats(0.0078125, 1, width=32),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1, width=32),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@given(st.lists(params, min_size=1, max_size=5))
def test_parameters_survive_packing(rows):
    table = SamplingTable(8, torch.device("cpu"))
    slots = torch.tensor([2 + i for i in range(len(rows))])
    table.write(slots, torch.tensor([pack(r) for r in rows], dtype=torch.int64).T)
    batch = table.gather(slots)
    for i, row in enumerate(rows):
        assert batch.seed_S[i] == row.seed
        assert batch.top_k_S[i] == row.top_k
        for name in ("temperature", "top_p", "min_p"):
            found = getattr(batch, f"{name}_S")[i]
            assert found == torch.tensor(getattr(row, name), dtype=torch.float32), name


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"min_p": 0.1}, True),
        ({"top_k": 5, "temperature": 0.0}, False),
    ],
)
def test_only_rows_that_leave_tokens_out_are_filtered(changes, expected):
    assert is_filtered(SamplingParams(**changes)) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_columns_past_the_vocabulary_are_never_chosen(temperature):
    sampler = Sampler.build(10, CPU)
    table = SamplingTable(65, torch.device("cpu"))
    rows = [SamplingParams(temperature=temperature, seed=i) for i in range(64)]
    slots = torch.arange(64)
    table.write(slots, torch.tensor([pack(r) for r in rows]).T)
    logits = torch.zeros(64, 16)
    logits[:, 10:] = 1000.0
    tokens = sampler.sample(logits, table.gather(slots), slots, phase="decode", is_filtered=False)
    assert tokens.max() < 10
    if temperature:
        assert len(tokens.unique()) > 5


@pytest.mark.parametrize("name", ["temperature", "top_p"])
@pytest.mark.parametrize("value", EXTREME)
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_smallest_temperature_and_top_p_choose_the_best_token(name, value, scale):
    logits_SV = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)) * scale
    params = SamplingParams(seed=5, **{name: value})
    assert not params.problems()
    table = SamplingTable(1, torch.device("cpu"))
    table.write(torch.tensor([0]), torch.tensor([pack(params)], dtype=torch.int64).T)
    token_S = Sampler.build(50, CPU).sample(
        logits_SV.clone(),
        table.gather(torch.tensor([0])),
        torch.tensor([7]),
        phase="decode",
        is_filtered=is_filtered(params),
    )
    assert token_S.item() == logits_SV.argmax().item()
