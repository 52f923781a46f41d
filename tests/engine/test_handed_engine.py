"""The engine case eng-batch-invariance of tests/data/handed.jsonl, whole: tokens and log-probabilities, bit for bit.

eng-prefix-cache-equal stands in test_prefix_cache.py; eng-pd-decode-prefix needs disaggregation, which there is not.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
import torch

from fakes import gpt_oss
from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig
from rose.config.scheduler import SchedulerConfig
from rose.engine.engine import LLMEngine
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams

LINES = (Path(__file__).parents[1] / "data" / "handed.jsonl").read_text().splitlines()
[CASE] = [c for c in map(json.loads, LINES) if c["id"] == "eng-batch-invariance"]
NUM_TOKENS = 128  # as the case's probe says
VOCAB = 50


def test_these_are_all_the_engine_cases():
    kinds = {c["id"] for c in map(json.loads, LINES) if c["kind"] == "engine"}
    assert kinds == {"eng-prefix-cache-equal", "eng-batch-invariance", "eng-pd-decode-prefix"}
    assert str(NUM_TOKENS) in CASE["input"]["probe"]


@pytest.fixture(scope="module")
def model():
    config = gpt_oss.config(window=40)
    weights = gpt_oss.hashed_weights(config, torch.float32)
    parameters = gpt_oss.parameters(config, weights)
    return gpt_oss.build(config, parameters, torch.float32, page_tokens=16, batch_invariant=True)


def _request(name, prompt, num_tokens):
    sampling = SamplingParams(temperature=0, logprobs=3)
    return Request(
        request_id=name, prompt_token_ids=prompt, max_tokens=num_tokens, sampling=sampling
    )


def _answer(model, generator, num_neighbours):
    """Return the probe's tokens and the bits of their log-probabilities, run among neighbours of its own."""
    config = EngineConfig(
        model="tiny",
        device="cpu",
        cache=CacheConfig(page_tokens=16, kv_tokens=4096),
        scheduler=SchedulerConfig(max_step_tokens=256, max_mixed_tokens=64, max_sequences=32),
    )
    engine = LLMEngine.from_model(model, config)
    draw = random.Random(9)
    requests = [_request("probe", [draw.randrange(VOCAB) for _ in range(20)], NUM_TOKENS)]
    for i in range(num_neighbours):
        prompt = [generator.randrange(VOCAB) for _ in range(generator.randint(1, 60))]
        # They come and go, so that the probe's batch changes all the time.
        requests.append(_request(f"n{i}", prompt, generator.randint(1, 40)))
    generator.shuffle(requests)
    outputs = dict(zip([r.request_id for r in requests], engine.generate(requests), strict=True))
    probe = outputs["probe"]
    numbers = [n for entry in probe.logprobs for n in (entry.logprob, *entry.top_logprobs)]
    assert len(probe.token_ids) == len(probe.logprobs) == NUM_TOKENS
    return tuple(probe.token_ids), struct.pack(f"{len(numbers)}d", *numbers)


def _check(model, num_repeats):
    generator = random.Random(0)
    answers = {
        _answer(model, generator, count)
        for _ in range(num_repeats)
        for count in CASE["input"]["neighbours"]
    }
    assert len(answers) == 1


def test_a_request_does_not_depend_on_its_neighbours(model):
    _check(model, 1)


@pytest.mark.slow
def test_a_request_does_not_depend_on_its_neighbours_however_often(model):
    _check(model, CASE["input"]["repeats"])


def test_without_the_mode_the_log_probabilities_differ():
    """So that the tests above can fail: a batch of another size rounds differently."""
    config = gpt_oss.config(window=40)
    weights = gpt_oss.hashed_weights(config, torch.float32)
    parameters = gpt_oss.parameters(config, weights)
    plain = gpt_oss.build(config, parameters, torch.float32, page_tokens=16)
    generator = random.Random(0)
    assert len({_answer(plain, generator, count)[1] for count in (0, 7, 31)}) > 1
