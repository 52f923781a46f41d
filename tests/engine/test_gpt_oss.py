"""The engine over the real gpt-oss, tiny and in float32, against a naive loop over the reference model."""

from __future__ import annotations

import random

import pytest
import torch

from fakes import gpt_oss
from fakes.graphs import use_eager_graphs
from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig
from rose.config.scheduler import SchedulerConfig
from rose.engine.engine import LLMEngine
from rose.models.gpt_oss.reference import forward
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0)
CONFIG = gpt_oss.config(window=40)
WEIGHTS = gpt_oss.hashed_weights(CONFIG, torch.float32)
CLOSE = 1e-4
"""A naive and a batched float32 sum differ by about 1e-6 of logits of a few units; where the best two are
closer than this, either may win, and the prompt is left out."""


@pytest.fixture(scope="module")
def model():
    return gpt_oss.build(CONFIG, gpt_oss.parameters(CONFIG, WEIGHTS), torch.float32, page_tokens=16)


def _engine(model, *, kv_tokens=4096, budget=64, sequences=8, is_overlapped=False):
    return LLMEngine.from_model(
        model,
        EngineConfig(
            model="tiny",
            device="cpu",
            cache=CacheConfig(page_tokens=16, kv_tokens=kv_tokens),
            scheduler=SchedulerConfig(
                max_step_tokens=budget, max_mixed_tokens=min(budget, 48), max_sequences=sequences
            ),
        ),
        is_overlapped=is_overlapped,
    )


def _naive(prompt, num_tokens):
    """Greedy tokens of the reference, and how close its choice ever was."""
    tokens, closest = list(prompt), float("inf")
    for _ in range(num_tokens):
        logits_V = forward(gpt_oss.reference_config(CONFIG), WEIGHTS, torch.tensor(tokens))[-1]
        best, second = logits_V.topk(2).values.tolist()
        closest = min(closest, best - second)
        tokens.append(int(logits_V.argmax()))
    return tokens[len(prompt) :], closest


def _requests(prompts, num_tokens, sampling=GREEDY):
    return [
        Request(request_id=f"r{i}", prompt_token_ids=p, max_tokens=num_tokens, sampling=sampling)
        for i, p in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def cases():
    """Prompts around pages, chunks and the window, with the tokens of the naive loop."""
    generator = random.Random(2)
    lengths = [1, 2, 15, 16, 17, 39, 40, 41, 63, 64, 65, 100, 130]
    prompts = [[generator.randrange(50) for _ in range(n)] for n in lengths]
    outputs = [_naive(p, 24) for p in prompts]
    kept = [(p, tokens) for p, (tokens, gap) in zip(prompts, outputs, strict=True) if gap > CLOSE]
    assert len(kept) >= len(prompts) - 2, "too many prompts with a tie"
    return kept


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"budget": 16},
        {"kv_tokens": 256},
        {"is_overlapped": True},
        {"is_overlapped": True, "kv_tokens": 256, "budget": 32},
    ],
    ids=str,
)
def test_batching_chunking_preemption_and_overlap_give_the_tokens_of_a_naive_loop(
    model, cases, setting
):
    engine = _engine(model, **setting)
    outputs = engine.generate(_requests([p for p, _ in cases], 24))
    assert [o.token_ids for o in outputs] == [tokens for _, tokens in cases]
    assert (engine.scheduler.num_preemptions > 0) == ("kv_tokens" in setting)


def test_padded_decode_steps_give_the_tokens_of_a_naive_loop(model, cases):
    engine = _engine(model, is_overlapped=True)
    graphs = use_eager_graphs(engine)
    outputs = engine.generate(_requests([p for p, _ in cases], 24))
    assert [o.token_ids for o in outputs] == [tokens for _, tokens in cases]
    assert set(graphs.used) <= {1, 2, 4, 8}
    assert 8 in graphs.used


def test_sampled_tokens_depend_on_the_seed_and_not_on_the_batch(model):
    generator = random.Random(4)
    prompts = [[generator.randrange(50) for _ in range(n)] for n in (5, 33, 90)]
    sampling = SamplingParams(temperature=0.8, top_p=0.95, top_k=20, seed=11)
    requests = _requests(prompts, 16, sampling)
    together = [o.token_ids for o in _engine(model).generate(requests)]
    alone = [_engine(model).generate([r])[0].token_ids for r in requests]
    assert together == alone
    other = SamplingParams(temperature=0.8, top_p=0.95, top_k=20, seed=12)
    assert together != [o.token_ids for o in _engine(model).generate(_requests(prompts, 16, other))]
