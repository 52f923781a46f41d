"""The waiting queue: order by turn, bounds in requests and in tokens, what a refusal says."""

from __future__ import annotations

import pytest

from rose.config.scheduler import SchedulerConfig
from rose.engine.sequence import Sequence
from rose.engine.waiting import WaitingQueue
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams
from rose.utils.errors import ConfigError


def _sequence(name, *, tokens=1, priority=0):
    request = Request(
        request_id=name, prompt_token_ids=[1] * tokens, max_tokens=1, priority=priority
    )
    return Sequence(request, SamplingParams(seed=0))


def _queue(**config):
    return WaitingQueue(SchedulerConfig(**config))


def test_smaller_priorities_run_sooner_and_equal_ones_in_order_of_arrival():
    queue = _queue()
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 5), ("e", 0)):
        queue.add(_sequence(name, priority=priority))
    assert [s.request_id for s in queue] == ["c", "a", "e", "b", "d"]


def test_who_comes_back_keeps_the_place_of_its_first_arrival():
    queue = _queue()
    for name in "abc":
        queue.add(_sequence(name))
    first, second = queue.take_first(), queue.take_first()
    queue.add(_sequence("d"))
    queue.add(second)
    queue.add(first)
    assert [s.request_id for s in queue] == ["a", "b", "c", "d"]


def test_the_queue_is_bounded_in_requests():
    queue = _queue(max_waiting=2)
    for name in "ab":
        assert queue.refusal(1) is None
        queue.add(_sequence(name))
    assert queue.is_full
    refusal = queue.refusal(1)
    assert refusal is not None
    assert "2 requests are waiting" in refusal
    queue.take_first()
    assert queue.refusal(1) is None


def test_the_queue_is_bounded_in_tokens_but_an_empty_one_takes_any_prompt():
    queue = _queue(max_waiting_tokens=100)
    assert queue.refusal(500) is None
    sequence = _sequence("a", tokens=60)
    queue.add(sequence)
    assert queue.refusal(40) is None
    refusal = queue.refusal(41)
    assert refusal is not None
    assert "1 requests with 60 tokens" in refusal
    assert "this one has 41" in refusal
    queue.remove(sequence)
    assert queue.num_tokens == 0
    assert queue.refusal(500) is None
    assert queue.refusal(40, num_opening_tokens=60) is None
    refusal = queue.refusal(41, num_opening_tokens=60)
    assert refusal is not None
    assert "0 requests with 60 tokens" in refusal


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="allowed: first-come, priority"):
        SchedulerConfig(policy="fifo")  # type: ignore[arg-type]
