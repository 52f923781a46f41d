"""The plain decoder: a step in two halves, and the cheap sampler wherever it suffices."""

from __future__ import annotations

import pytest

from fakes.graphs import use_eager_graphs
from fakes.model import FakeModel, expected_output
from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig, KernelsConfig
from rose.config.parallel import ParallelConfig
from rose.config.scheduler import SchedulerConfig
from rose.decoders.base import step
from rose.decoders.registry import find_decoder
from rose.engine.engine import LLMEngine
from rose.engine.sequence import Sequence
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams
from rose.utils.errors import ConfigError, ContractError

GREEDY = SamplingParams(temperature=0, seed=0)


def _config(**changes):
    return EngineConfig(
        model="fake",
        device="cpu",
        cache=CacheConfig(page_tokens=16, kv_tokens=512),
        scheduler=SchedulerConfig(max_step_tokens=32, max_mixed_tokens=32, max_sequences=8),
        **changes,
    )


def _engine(**changes):
    return LLMEngine.from_model(FakeModel(), _config(), **changes)


def _request(name, prompt, max_tokens=20, sampling=GREEDY):
    return Request(
        request_id=name, prompt_token_ids=prompt, max_tokens=max_tokens, sampling=sampling
    )


def test_a_chunk_inside_a_prompt_samples_nothing():
    engine = _engine()
    engine.scheduler.add(Sequence(_request("r", [1] * 40), GREEDY))
    assert step(engine.decoder, engine.scheduler.schedule()).token_ids == {}
    assert step(engine.decoder, engine.scheduler.schedule()).token_ids == {
        0: expected_output([1] * 40, 1)
    }


def test_two_steps_may_be_in_flight_and_are_collected_in_order():
    engine = _engine()
    engine.scheduler.add(Sequence(_request("r", [1, 2]), GREEDY))
    handles = [engine.decoder.launch(engine.scheduler.schedule()) for _ in range(2)]
    found = [engine.decoder.collect(h).token_ids[0][0] for h in handles]
    assert found == expected_output([1, 2], 2)


def test_rows_are_filtered_only_while_someone_asks_for_it():
    engine = _engine()
    flags = []
    sample = engine.decoder._sampler.sample

    def spy(*arguments, is_filtered, **options):
        flags.append(is_filtered)
        return sample(*arguments, is_filtered=is_filtered, **options)

    engine.decoder._sampler.sample = spy
    filtered = SamplingParams(temperature=1, top_k=3, seed=1)
    engine.generate([_request("a", [1], 6)])
    engine.generate([_request("b", [1], 3, filtered), _request("c", [1], 6)])
    engine.generate([_request("d", [1], 2), _request("e", [1], 2)])
    assert flags == [False] * 6 + [True] * 3 + [False] * 3 + [False] * 2


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_padding_rows_change_nothing(is_overlapped):
    engine = _engine(is_overlapped=is_overlapped)
    graphs = use_eager_graphs(engine, (4,))
    prompts = [[i + 1] * (5 + 9 * i) for i in range(7)]
    outputs = engine.generate(_request(f"r{i}", p, 10 + 7 * i) for i, p in enumerate(prompts))
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert output.token_ids == expected_output(prompt, 10 + 7 * i)
    assert set(graphs.used) == {4, 8}


def test_an_unknown_decoder_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match="decoder='magic' is not known; allowed: plain"):
        find_decoder("magic")


def test_checked_calls_give_the_same_tokens_and_find_a_broken_call():
    config = _config(kernels=KernelsConfig(check_calls=True))
    engine = LLMEngine.from_model(FakeModel(), config)
    [output] = engine.generate([_request("a", [5, 6, 7])])
    assert output.token_ids == expected_output([5, 6, 7], 20)
    tables = engine.decoder.runner.tables
    tables.last_tokens_R = tables.last_tokens_R[:-1]
    with pytest.raises(ContractError, match="R is"):
        engine.generate([_request("b", [5, 6, 7])])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_tokens": 513}, "context_tokens=513; the model takes 512"),
        ({"context_tokens": 0}, "context_tokens=0"),
        ({"parallel": ParallelConfig(tp=2)}, "tp=2, ep=1, dp=1 were asked for"),
    ],
)
def test_a_model_made_elsewhere_is_held_to_the_limits_too(changes, message):
    with pytest.raises(ConfigError, match=message):
        LLMEngine.from_model(FakeModel(), _config(**changes))
