"""Buckets of decode graphs; replays against eager steps where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from fakes.graphs import use_eager_graphs
from rose.bench.build import build, setup
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams
from rose.runtime.graphs import BATCH_SIZES, DecodeGraphs


def _graphs(max_rows, max_lengths=(1024, 8192)):
    return DecodeGraphs(lambda *_: None, max_rows=max_rows, max_lengths=max_lengths)


@pytest.mark.parametrize(
    ("rows", "bucket"), [(1, 1), (3, 4), (17, 24), (129, 160), (255, 256), (256, 256)]
)
def test_a_batch_takes_the_smallest_bucket_that_holds_it(rows, bucket):
    assert _graphs(256).bucket(rows) == bucket


def test_the_last_bucket_is_the_most_that_runs():
    assert _graphs(100).batch_sizes[-2:] == [96, 100]
    assert _graphs(256).batch_sizes == list(BATCH_SIZES)
    assert _graphs(300).bucket(300) == 300


def test_lengths_take_the_smallest_bound():
    graphs = _graphs(8)
    assert [graphs.length_bucket(n) for n in (1, 1024, 1025, 8192)] == [1024, 1024, 8192, 8192]


def _requests():
    generator = torch.Generator().manual_seed(0)
    requests = []
    for i in range(11):
        length = int(torch.randint(1, 300, (), generator=generator))
        prompt = torch.randint(512, (length,), generator=generator).tolist()
        filters = {"top_p": 0.9, "top_k": 40} if i % 3 == 0 else {}
        if i % 4 == 2:
            filters |= {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 5}
        sampling = SamplingParams(temperature=float(i % 2), seed=i, **filters)
        requests.append(
            Request(
                request_id=f"r{i}", prompt_token_ids=prompt, max_tokens=5 + 9 * i, sampling=sampling
            )
        )
    return requests


@pytest.mark.gpu
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_replayed_steps_give_the_tokens_of_eager_ones(is_overlapped):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    outputs = []
    for use_graphs in (True, False):
        bench = setup(
            size="tiny",
            weights="mxfp4",  # whose decode kernel asks the host nothing
            device="cuda",
            only={},
            kv_tokens=8192,
            max_step_tokens=4096,
            graphs=use_graphs,
        )
        engine = build(bench)
        if not use_graphs:
            # The same buckets, so that the same kernels see the same shapes.
            use_eager_graphs(engine, BATCH_SIZES)
        if not is_overlapped:
            engine.step = engine._step_in_turn
        outputs.append([(g.token_ids, g.logprobs) for g in engine.generate(_requests())])
    assert outputs[0] == outputs[1]
