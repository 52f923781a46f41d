"""Frames are read back as they were written, and everything else is refused with a reason."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.protocol.codec import (
    PROTOCOL_VERSION,
    ProtocolError,
    decode_from_engine,
    decode_to_engine,
    encode_from_engine,
    encode_to_engine,
)
from rose.protocol.event import EngineStatus, ErrorEvent, FinishedEvent, TokensEvent
from rose.protocol.request import Abort, Request, StatusQuery
from rose.protocol.sampling_params import SamplingParams

REQUEST = Request(
    request_id="r1",
    prompt_token_ids=[1, 200018, 3],
    max_tokens=7,
    sampling=SamplingParams(temperature=0.5, seed=-(2**63)),
    stop_token_ids=[200002],
)


@pytest.mark.parametrize("message", [REQUEST, Abort(request_id="é"), StatusQuery()])
def test_messages_to_the_engine_survive_the_wire(message):
    assert decode_to_engine(encode_to_engine(message)) == message


def test_events_of_a_step_survive_the_wire_in_order():
    events = [
        TokensEvent(request_id="a", token_ids=[1, 2]),
        FinishedEvent(request_id="a", reason="stop", num_prompt_tokens=3, num_output_tokens=2),
        ErrorEvent(request_id="b", code="queue_full", message="later"),
        EngineStatus(is_ready=True, model="m", context_tokens=9, vocab_size=10),
    ]
    assert decode_from_engine(encode_from_engine(events)) == events


def test_another_version_is_named_in_the_error():
    frame = bytes([PROTOCOL_VERSION + 1]) + encode_to_engine(REQUEST)[1:]
    with pytest.raises(ProtocolError, match=f"version {PROTOCOL_VERSION + 1} .*same release"):
        decode_to_engine(frame)


@pytest.mark.parametrize(
    "body",
    [
        {"type": "surprise"},
        {"type": "request", "request_id": "r"},
        {"type": "abort", "request_id": "r", "extra": 1},
        {"type": "abort", "request_id": 5},
        [1, 2],
    ],
)
def test_unknown_tags_and_wrong_fields_are_refused(body):
    frame = bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(body)
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode_to_engine(frame)


@given(st.binary(max_size=60))
def test_random_bytes_raise_nothing_but_protocol_errors(frame):
    for decode in (decode_to_engine, decode_from_engine):
        try:
            decode(frame)
        except ProtocolError:
            continue
