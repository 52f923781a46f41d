"""Penalties, biases, min_tokens and log-probabilities through the whole engine, against a naive loop."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from fakes import gpt_oss
from fakes.graphs import use_eager_graphs
from fakes.model import VOCAB, FakeModel, expected_next, expected_output
from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig
from rose.config.scheduler import SchedulerConfig
from rose.engine.engine import LLMEngine
from rose.kernels.sample.reference import reference as sample
from rose.models.gpt_oss.reference import forward
from rose.protocol.event import ErrorEvent
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams
from rose.sampling.reference import adjusted

CLOSE = 1e-4
"""Of a tiny float32 model against its reference: sums in another order, see test_gpt_oss.py."""

SETTINGS = [
    {},
    {"budget": 16},
    {"kv_tokens": 256},
    {"is_overlapped": True},
    {"is_overlapped": True, "kv_tokens": 256, "budget": 32},
]


def _engine(model=None, *, kv_tokens=1024, budget=64, sequences=8, is_overlapped=False):
    return LLMEngine.from_model(
        model or FakeModel(),
        EngineConfig(
            model="fake",
            device="cpu",
            cache=CacheConfig(page_tokens=16, kv_tokens=kv_tokens),
            scheduler=SchedulerConfig(
                max_step_tokens=budget, max_mixed_tokens=min(32, budget), max_sequences=sequences
            ),
        ),
        is_overlapped=is_overlapped,
    )


def _logits(token_ids):
    logits = [0.0] * VOCAB
    logits[expected_next(token_ids)] = 4.0
    return logits


def _naive(request):
    """The tokens and their log-probabilities, one by one, by the definitions alone."""
    sampling, output, chosen = request.sampling, [], []
    while len(output) < request.max_tokens:
        known = request.prompt_token_ids + output
        logits = _logits(known)
        changed = adjusted(
            logits,
            sampling,
            prompt_ids=request.prompt_token_ids,
            output_ids=output,
            stop_ids=request.stop_token_ids,
        )
        tokens_S = torch.zeros(1, dtype=torch.int64)
        sample(
            torch.tensor([changed]),
            torch.tensor([sampling.temperature]),
            torch.tensor([sampling.top_k]),
            torch.tensor([sampling.top_p]),
            torch.tensor([sampling.min_p]),
            torch.tensor([sampling.seed]),
            torch.tensor([len(known)]),
            is_filtered=True,
            tokens_S=tokens_S,
        )
        token = int(tokens_S)
        output.append(token)
        chosen.append(float(torch.tensor(logits).log_softmax(0)[token]))
        if token in request.stop_token_ids:
            break
    return output, chosen


def _requests(count=14, seed=0):
    """Every second request changes logits; the stop tokens are easily hit."""
    generator = random.Random(seed)
    kinds = [
        {"repetition_penalty": 1.7, "frequency_penalty": 0.3},
        {},
        {"presence_penalty": 1.1, "logprobs": 3},
        {"top_p": 0.8},
        {"logit_bias": {5: 3.5, 6: -100.0}, "min_tokens": 12},
        {"logprobs": 0, "top_k": 5},
        {"frequency_penalty": -1.5, "min_tokens": 4, "min_p": 0.01},
    ]
    return [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=[generator.randrange(VOCAB) for _ in range(generator.randint(1, 60))],
            max_tokens=60,
            sampling=SamplingParams(temperature=1.2, seed=i - 4, **kinds[i % len(kinds)]),
            stop_token_ids=[generator.randrange(VOCAB) for _ in range(i % 2)],
        )
        for i in range(count)
    ]


REQUESTS = _requests()
NAIVE = [_naive(r) for r in REQUESTS]


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_batching_chunks_preemption_and_overlap_give_the_tokens_of_a_naive_loop(setting, is_padded):
    engine = _engine(**setting)
    if is_padded:
        use_eager_graphs(engine)
    outputs = engine.generate(REQUESTS)
    for request, output, (tokens, chosen) in zip(REQUESTS, outputs, NAIVE, strict=True):
        assert output.token_ids == tokens, request
        if request.sampling.logprobs is None:
            assert output.logprobs == []
            continue
        assert [entry.logprob for entry in output.logprobs] == pytest.approx(chosen, abs=1e-5)
        for entry in output.logprobs:
            assert len(entry.top_ids) == len(entry.top_logprobs) == request.sampling.logprobs
    assert (engine.scheduler.num_preemptions > 0) == ("kv_tokens" in setting)


def test_the_parameters_make_a_difference():
    changed = []
    for request, (tokens, _) in zip(REQUESTS, NAIVE, strict=True):
        if request.sampling.changes_logits:
            plain = SamplingParams(temperature=1.2, seed=request.sampling.seed)
            changed.append(_naive(msgspec.structs.replace(request, sampling=plain))[0] != tokens)
    assert sum(changed) >= 0.75 * len(changed), "tokens may agree by chance, not often"


def test_a_stop_token_comes_no_earlier_than_min_tokens_allow():
    prompt = [3, 1, 4]
    whole = expected_output(prompt, 8)
    outputs = _engine().generate(
        Request(
            request_id=f"r{n}",
            prompt_token_ids=prompt,
            max_tokens=20,
            sampling=SamplingParams(temperature=0, min_tokens=n),
            stop_token_ids=[whole[2]],
        )
        for n in (0, 2, 3)
    )
    assert outputs[0].token_ids == outputs[1].token_ids == whole[:3]
    assert len(outputs[2].token_ids) > 3
    assert outputs[2].token_ids[:2] == whole[:2]


def test_a_slot_forgets_what_its_last_sequence_changed():
    engine = _engine(sequences=1)
    biased = SamplingParams(temperature=0, logit_bias={7: 100.0})
    plain = SamplingParams(temperature=0, logprobs=1)
    outputs = engine.generate(
        Request(request_id=f"r{i}", prompt_token_ids=[1, 2], max_tokens=6, sampling=s)
        for i, s in enumerate((biased, plain, biased))
    )
    assert [o.token_ids for o in outputs] == [[7] * 6, expected_output([1, 2], 6), [7] * 6]


def test_logprobs_are_those_of_the_model_before_anything_changes_its_logits():
    config = gpt_oss.config(window=40)
    weights = gpt_oss.hashed_weights(config, torch.float32)
    model = gpt_oss.build(
        config, gpt_oss.parameters(config, weights), torch.float32, page_tokens=16
    )
    sampling = SamplingParams(
        temperature=0.3, top_k=2, repetition_penalty=2.0, seed=3, logprobs=5, logit_bias={1: 9.0}
    )
    prompt = [5, 9, 33, 12]
    [output] = _engine(model).generate(
        [Request(request_id="r", prompt_token_ids=prompt, max_tokens=12, sampling=sampling)]
    )
    logits_TV = forward(
        gpt_oss.reference_config(config), weights, torch.tensor(prompt + output.token_ids)
    )
    for i, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        expected_V = logits_TV[len(prompt) - 1 + i].log_softmax(0)
        assert entry.logprob == pytest.approx(float(expected_V[token]), abs=CLOSE)
        assert entry.top_logprobs == pytest.approx(expected_V.topk(5).values.tolist(), abs=CLOSE)
        assert entry.top_logprobs == pytest.approx(expected_V[entry.top_ids].tolist(), abs=CLOSE)


@pytest.mark.parametrize(
    ("sampling", "stops", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, [], "logit_bias"),
        ({"min_tokens": 5}, [], "min_tokens=5; allowed: 0 to max_tokens=4"),
        ({"min_tokens": 1}, list(range(65)), "min_tokens with 65 stop_token_ids"),
        ({"presence_penalty": 3.0}, [], "presence_penalty=3.0"),
    ],
)
def test_what_cannot_be_held_is_refused(sampling, stops, message):
    request = Request(
        request_id="r",
        prompt_token_ids=[1],
        max_tokens=4,
        sampling=SamplingParams(**sampling),
        stop_token_ids=stops,
    )
    [error] = _engine().add(request)
    assert isinstance(error, ErrorEvent)
    assert error.code == "invalid_request"
    assert message in error.message
