"""The predicted bound of a step follows what steps took, and sums over steps under way."""

from __future__ import annotations

import dataclasses

import pytest

from rose.engine.clock import FIRST_STEPS, StepClock
from rose.protocol.sampling_params import SamplingParams
from rose.runtime.plan import PlanEntry, StepPlan


class Time:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def _plan(num_tokens):
    entry = PlanEntry.decode(0)
    entry.num_tokens = num_tokens
    prefill = [entry] if num_tokens else []
    return StepPlan(step=0, decode=[], prefill=prefill, sample_slots=[], max_length=1)


def _run(clock, time, num_tokens, seconds):
    clock.begin(_plan(num_tokens))
    bound = clock.bound_s
    time.now += seconds
    clock.end()
    return bound


def test_a_long_chunk_is_predicted_from_what_tokens_took():
    time = Time()
    clock = StepClock(time)
    assert _run(clock, time, 0, 0.01) == 0.0
    _run(clock, time, 100, 1.01)
    assert _run(clock, time, 1000, 12.0) == pytest.approx(10.01, rel=0.05)
    assert _run(clock, time, 0, 0.01) == pytest.approx(0.01, rel=0.05)
    assert clock.bound_s == 0.0


def test_the_worst_is_forgotten_slowly_and_few_tokens_say_nothing_of_many():
    time = Time()
    clock = StepClock(time)
    _run(clock, time, 5, 2.0)
    assert clock.token_s == 0.0
    for _ in range(14):
        _run(clock, time, 0, 0.001)
    assert 0.9 < clock.step_s < 1.1


def test_steps_that_overlap_count_once_and_their_bounds_add_up():
    time = Time()
    clock = StepClock(time)
    _run(clock, time, 0, 1.0)
    clock.begin(_plan(0))
    time.now += 0.25
    clock.begin(_plan(0))
    assert clock.bound_s == pytest.approx(2.0, rel=0.05)
    time.now += 0.75
    assert clock.end() == pytest.approx(1.0)
    assert clock.bound_s == pytest.approx(1.0, rel=0.05)
    time.now += 0.5
    assert clock.end() == pytest.approx(0.5)


def test_steps_that_may_compile_something_get_more_time_once():
    time = Time()
    clock = StepClock(time)
    clock.first_s = 6.0

    def bound(sampling=None, masks=None):
        plan = _plan(1)
        plan.prefill[0].sampling = sampling
        plan = dataclasses.replace(plan, masks=masks or {})
        clock.begin(plan)
        found = clock.bound_s
        clock.end()
        return found

    plain, scored = SamplingParams(), SamplingParams(logprobs=2)
    for new in ({"sampling": plain}, {"sampling": scored}, {"masks": {0: b""}}):
        assert bound(**new) == 6.0
        assert [bound() for _ in range(FIRST_STEPS)] == [6.0] * (FIRST_STEPS - 1) + [0.0]
        assert bound(**new) == 0.0
