"""A sequence moves only along its states, and ends at the first token that ends it."""

from __future__ import annotations

import pytest

from rose.cache.table import SequencePages
from rose.engine.sequence import Sequence, SequenceState
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams


def _sequence(**kwargs):
    values = {"request_id": "r", "prompt_token_ids": [1, 2, 3], "max_tokens": 4} | kwargs
    return Sequence(Request(**values), SamplingParams(seed=1))


def test_tokens_after_a_stop_token_are_not_taken():
    sequence = _sequence(stop_token_ids=[9])
    assert sequence.append([7, 9, 8]) == ([7, 9], "stop")
    assert sequence.token_ids == [1, 2, 3, 7, 9]


def test_tokens_past_the_limit_are_not_taken():
    sequence = _sequence(max_tokens=2)
    assert sequence.append([7]) == ([7], None)
    assert sequence.append([8, 9]) == ([8], "length")


def test_a_stop_token_at_the_limit_counts_as_a_stop():
    assert _sequence(max_tokens=1, stop_token_ids=[9]).append([9]) == ([9], "stop")


def test_a_sequence_may_run_again_after_a_preemption_and_prefills_its_output_too():
    sequence = _sequence()
    sequence.start(0, SequencePages(1))
    sequence.num_tokens, sequence.num_pending = 4, 1
    sequence.append([7])
    sequence.stop_running(SequenceState.WAITING)
    sequence.start(3, SequencePages(1))
    assert (sequence.num_scheduled, sequence.prefill_end, sequence.slot) == (0, 4, 3)


def test_forbidden_moves_are_caught():
    sequence = _sequence()
    sequence.start(0, SequencePages(1))
    with pytest.raises(AssertionError, match="starts while"):
        sequence.start(1, SequencePages(1))
    sequence.stop_running(SequenceState.FINISHED)
    with pytest.raises(AssertionError, match="ends twice"):
        sequence.stop_running(SequenceState.FINISHED)
