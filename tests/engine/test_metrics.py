"""What the engine counts of steps and requests, in its status."""

from __future__ import annotations

import msgspec
import pytest

from fakes.model import FakeModel
from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig
from rose.config.scheduler import SchedulerConfig
from rose.engine.engine import LLMEngine
from rose.engine.metrics import Histogram
from rose.protocol.event import EngineStatus
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams
from rose.utils.errors import ConfigError


def _engine(is_overlapped=False, page_tokens=16, context_tokens=None):
    config = EngineConfig(
        model="fake",
        device="cpu",
        context_tokens=context_tokens,
        cache=CacheConfig(page_tokens=page_tokens, kv_tokens=512),
        scheduler=SchedulerConfig(max_step_tokens=64, max_mixed_tokens=64, max_sequences=2),
    )
    return LLMEngine.from_model(FakeModel(), config, is_overlapped=is_overlapped)


def _request(name, prompt, max_tokens):
    sampling = SamplingParams(temperature=0)
    return Request(
        request_id=name, prompt_token_ids=prompt, max_tokens=max_tokens, sampling=sampling
    )


def test_a_value_counts_in_the_first_bucket_that_holds_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.buckets().counts == [2, 2, 1]
    assert histogram.buckets().total == 14.0


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_every_step_and_every_request_is_in_the_status_once(is_overlapped):
    engine = _engine(is_overlapped)
    engine.generate([_request(f"r{i}", [i, 1, 2] * 20, 5) for i in range(5)])
    engine.add(_request("gone", [1], 50))
    engine.abort("gone")
    status = msgspec.msgpack.decode(msgspec.msgpack.encode(engine.status()), type=EngineStatus)
    counts = {name: sum(b.counts) for name, b in status.histograms.items()}
    phases = sum(counts[f"step_seconds_{p}"] for p in ("prefill", "decode", "mixed"))
    assert phases == counts["step_tokens"] == status.num_steps
    assert counts["step_seconds_prefill"] >= 1
    assert counts["step_seconds_decode"] >= 1
    assert counts["request_queue_seconds"] == 5
    assert counts["request_time_per_output_token_seconds"] == 5
    assert status.num_queried_tokens == 5 * 60
    assert status.num_aborted == 1
    total = {name: b.total for name, b in status.histograms.items()}
    parts = total["request_prefill_seconds"] + total["request_decode_seconds"]
    assert total["request_inference_seconds"] == pytest.approx(parts)


def test_measuring_a_machine_leaves_no_trace_in_the_counts():
    engine = _engine()
    engine.measure_steps()
    status = engine.status()
    assert (status.num_steps, status.num_prompt_tokens, status.num_queried_tokens) == (0, 0, 0)
    assert (status.kv_pages_used, status.kv_pages_idle) == (0, 0)
    assert engine.clock.step_s > 0


@pytest.mark.parametrize("context_tokens", [2, 3, 5, 50])
def test_a_machine_is_measured_within_the_shortest_context(context_tokens):
    engine = _engine(page_tokens=64, context_tokens=context_tokens)
    engine.measure_steps()
    assert engine.clock.step_s > 0


def test_a_context_without_room_for_an_answer_is_refused():
    with pytest.raises(ConfigError, match="context_tokens=1; allowed: 2 or more"):
        EngineConfig(model="fake", context_tokens=1)
