"""The channel carries messages both ways over every transport, whoever starts first."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from rose.protocol.channel import EngineEndpoint, FrontendEndpoint, LocalPair
from rose.protocol.codec import PROTOCOL_VERSION, ProtocolError
from rose.protocol.event import TokensEvent
from rose.protocol.request import Abort, StatusQuery
from rose.utils.errors import ConfigError

EVENTS = [TokensEvent(request_id="a", token_ids=[1]), TokensEvent(request_id="b", token_ids=[2])]


async def _round_trip(engine, frontend):
    await frontend.send(Abort(request_id="a"))
    received = await asyncio.to_thread(engine.receive, 5000)
    assert received == Abort(request_id="a")
    assert engine.receive() is None
    assert engine.send(EVENTS)
    assert await asyncio.wait_for(frontend.receive(), 5) == EVENTS


def test_in_process_pair_carries_both_ways():
    async def run():
        pair = LocalPair()
        frontend = pair.frontend()
        await _round_trip(pair.engine, frontend)
        frontend.close()
        pair.close()

    asyncio.run(run())


def test_ipc_carries_both_ways_with_the_frontend_first(tmp_path):
    async def run():
        address = f"ipc://{tmp_path}/engine.sock"
        frontend = FrontendEndpoint(address)
        await frontend.send(StatusQuery())
        engine = EngineEndpoint(address)
        assert await asyncio.to_thread(engine.receive, 5000) == StatusQuery()
        await _round_trip(engine, frontend)
        frontend.close()
        engine.close()

    asyncio.run(run())


def test_a_new_frontend_is_served_after_the_first_left(tmp_path):
    async def run():
        address = f"ipc://{tmp_path}/engine.sock"
        engine = EngineEndpoint(address)
        for _ in range(2):
            frontend = FrontendEndpoint(address)
            await _round_trip(engine, frontend)
            frontend.close()
        engine.close()

    asyncio.run(run())


def test_events_without_a_frontend_are_dropped_not_waited_for(tmp_path):
    engine = EngineEndpoint(f"ipc://{tmp_path}/engine.sock")
    assert not engine.send(EVENTS)
    engine.close()


def test_a_broken_frame_does_not_hide_the_next(tmp_path):
    engine = EngineEndpoint(f"ipc://{tmp_path}/engine.sock")
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect(f"ipc://{tmp_path}/engine.sock")
    raw.send(bytes([PROTOCOL_VERSION]) + b"nonsense")
    raw.send(bytes([PROTOCOL_VERSION]) + b"\x81\xa4type\xacstatus_query")
    with pytest.raises(ProtocolError):
        engine.receive(5000)
    assert engine.receive(5000) == StatusQuery()
    raw.close(0)
    context.term()
    engine.close()


def test_an_address_that_cannot_be_bound_says_what_is_allowed():
    with pytest.raises(ConfigError, match=r"cannot bind 'nonsense'.*ipc://PATH"):
        EngineEndpoint("nonsense")
