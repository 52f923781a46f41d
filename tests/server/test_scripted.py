"""The scripted engine replays what its lines say, request by request."""

from __future__ import annotations

import pytest

from rose.protocol.event import ErrorEvent, FinishedEvent, TokensEvent
from rose.protocol.request import Abort, Request, StatusQuery
from rose.server.scripted import (
    ScriptConfig,
    ScriptedEngine,
    ScriptError,
    ScriptLine,
    decode_config,
)
from rose.utils.errors import ConfigError


def _engine(*lines, **fields):
    return ScriptedEngine(ScriptConfig(address="", model="m", lines=list(lines), **fields))


def _request(name="a", max_tokens=100):
    return Request(request_id=name, prompt_token_ids=[1, 2, 3], max_tokens=max_tokens)


def _play(engine, request, seconds=10.0):
    """Return the events of one request, with the status events left out."""
    events = engine.take(request, 0.0)
    for step in range(1000):
        events += engine.step(seconds * step / 1000)
        if events and isinstance(events[-1], FinishedEvent | ErrorEvent):
            break
    return [event for event in events if hasattr(event, "request_id")]


def test_a_line_is_replayed_token_by_token_and_ends_with_stop():
    events = _play(_engine(ScriptLine(tokens=[7, 8], cached_tokens=2)), _request())
    assert [e.token_ids for e in events[:-1]] == [[7], [8]]
    assert [e.num_cached_tokens for e in events[:-1]] == [2, 0]
    assert events[-1] == FinishedEvent(
        request_id="a", reason="stop", num_prompt_tokens=3, num_output_tokens=2
    )


def test_the_limit_of_the_request_cuts_with_length():
    events = _play(
        _engine(ScriptLine(tokens=[7, 8, 9], error="never sent")), _request(max_tokens=2)
    )
    assert events[-1].reason == "length"
    assert events[-1].num_output_tokens == 2


def test_each_request_gets_the_next_line_and_the_first_comes_again():
    engine = _engine(ScriptLine(tokens=[1]), ScriptLine(tokens=[2]))
    first = [_play(engine, _request(name))[0].token_ids for name in "abc"]
    assert first == [[1], [2], [1]]


def test_a_line_that_needs_tokens_answers_the_prompts_that_hold_them():
    engine = _engine(
        ScriptLine(tokens=[1], needs=[[2, 3], [1]]),
        ScriptLine(tokens=[2], needs=[[23]]),
        ScriptLine(tokens=[3]),
    )
    prompts = {"a": [1, 2, 3], "b": [2, 3, 1], "c": [1, 23], "d": [2, 1, 3], "e": [2]}
    found = {
        name: _play(engine, Request(request_id=name, prompt_token_ids=ids, max_tokens=9))
        for name, ids in prompts.items()
    }
    tokens = {name: events[0].token_ids for name, events in found.items()}
    assert tokens == {"a": [1], "b": [1], "c": [2], "d": [3], "e": [3]}
    [refused] = _play(_engine(ScriptLine(needs=[[9]])), _request())
    assert refused.code == "invalid_request"


def test_delays_hold_tokens_back():
    engine = _engine(ScriptLine(tokens=[1, 2], delay_ms=100))
    engine.take(_request(), 0.0)
    tokens = [e for e in engine.step(0.05) if isinstance(e, TokensEvent)]
    assert tokens == []
    assert engine.wait_ms(0.05) == 50
    assert [e.token_ids for e in engine.step(0.11) if isinstance(e, TokensEvent)] == [[1]]
    assert engine.status().num_running == 1


def test_requests_of_one_delay_take_their_steps_together():
    engine = _engine(ScriptLine(tokens=[1, 2], delay_ms=100))
    engine.take(_request("a"), 0.01)
    engine.take(_request("b"), 0.09)
    for now in (0.11, 0.21):
        events = [e for e in engine.step(now) if isinstance(e, TokensEvent)]
        assert [e.request_id for e in events] == ["a", "b"]


def test_an_abort_ends_a_request():
    engine = _engine(ScriptLine(tokens=[1, 2], delay_ms=100))
    engine.take(_request(), 0.0)
    [event] = engine.take(Abort(request_id="a"), 0.0)
    assert event.reason == "abort"
    assert engine.take(Abort(request_id="unknown"), 0.0) == []
    assert engine.status().num_running == 0


def test_errors_come_after_the_tokens():
    events = _play(_engine(ScriptLine(tokens=[1], error=ScriptError(message="x"))), _request())
    assert [type(e) for e in events] == [TokensEvent, ErrorEvent]
    assert events[-1].code == "engine_failed"


def test_requests_that_cannot_run_are_refused():
    engine = _engine(ScriptLine(tokens=[1], delay_ms=50), context_tokens=10, max_running=1)
    assert _play(engine, _request(max_tokens=8))[0].code == "context_length_exceeded"
    engine.take(_request("a", 5), 0.0)
    assert engine.take(_request("a", 5), 0.0)[0].code == "duplicate_request_id"
    full = engine.take(_request("b", 5), 0.0)[0]
    assert (full.code, full.message) == (
        "queue_full",
        "1 requests run, which is the most this scripted engine takes; try again later",
    )


def test_a_query_is_answered_with_the_state():
    [status] = _engine(ScriptLine(tokens=[1]), context_tokens=10).take(StatusQuery(), 0.0)
    assert (status.is_ready, status.model, status.context_tokens) == (True, "m", 10)


def test_wrong_configurations_are_explained():
    with pytest.raises(ConfigError, match="no lines"):
        _engine()
    with pytest.raises(ConfigError, match="cannot be read"):
        decode_config(b'{"lines": 3}')
