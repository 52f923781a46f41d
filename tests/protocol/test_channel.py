"""The channel carries messages both ways over every transport, whoever starts first."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from rose.protocol.channel import EngineEndpoint, FrontendEndpoint, LocalPair
from rose.protocol.codec import PROTOCOL_VERSION, ProtocolError
from rose.protocol.event import EngineStatus, ErrorEvent, FinishedEvent, TokensEvent
from rose.protocol.request import Abort, Request, StatusQuery
from rose.utils.errors import ConfigError

EVENTS = [TokensEvent(request_id="a", token_ids=[1]), TokensEvent(request_id="b", token_ids=[2])]


STATUS = EngineStatus(is_ready=True, model="m", context_tokens=8, vocab_size=9)


def _request(name):
    return Request(request_id=name, prompt_token_ids=[1], max_tokens=1)


async def _round_trip(engine, frontend):
    for name in ("a", "b"):
        await frontend.send(_request(name))
        assert await asyncio.to_thread(engine.receive, 5000) == _request(name)
    await frontend.send(Abort(request_id="a"))
    assert await asyncio.to_thread(engine.receive, 5000) == Abort(request_id="a")
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


def test_each_frontend_gets_the_events_of_its_requests_and_all_get_the_state(tmp_path):
    async def run():
        address = f"ipc://{tmp_path}/engine.sock"
        engine = EngineEndpoint(address)
        frontends = {name: FrontendEndpoint(address) for name in ("a", "b", "c")}
        for name, frontend in frontends.items():
            await frontend.send(_request(name))
            await asyncio.to_thread(engine.receive, 5000)
        assert engine.send([*EVENTS, STATUS])
        expected = {"a": [EVENTS[0], STATUS], "b": [EVENTS[1], STATUS], "c": [STATUS]}
        for name, frontend in frontends.items():
            assert await asyncio.wait_for(frontend.receive(), 5) == expected[name]

        # An event after the last one of its request belongs to nobody.
        end = FinishedEvent(request_id="a", reason="stop", num_prompt_tokens=1, num_output_tokens=1)
        assert engine.send([end])
        assert not engine.send([EVENTS[0]])
        for frontend in frontends.values():
            frontend.close()
        engine.close()

    asyncio.run(run())


def test_requests_of_a_frontend_that_is_gone_are_told_once_and_no_others(tmp_path):
    async def run():
        address = f"ipc://{tmp_path}/engine.sock"
        engine = EngineEndpoint(address)
        frontends = {name: FrontendEndpoint(address) for name in ("a", "b")}
        for name, frontend in frontends.items():
            await frontend.send(_request(name))
            await asyncio.to_thread(engine.receive, 5000)
        frontends["a"].close()
        lost = {}
        for _ in range(500):
            assert engine.send(EVENTS)
            lost = engine.take_lost()
            if lost:
                break
            await asyncio.sleep(0.01)
        assert lost == {"a": True}
        end = ErrorEvent(request_id="a", code="engine_failed", message="lost")
        assert not engine.send([end])
        assert engine.send(EVENTS)
        assert engine.take_lost() == {}
        frontends["b"].close()
        engine.close()

    asyncio.run(run())


def test_the_state_reaches_a_frontend_that_was_not_read_yet(tmp_path):
    """While a model loads nobody reads messages, and frontends are told all the same."""

    async def run():
        address = f"ipc://{tmp_path}/engine.sock"
        engine = EngineEndpoint(address)
        frontend = FrontendEndpoint(address)
        for _ in range(500):
            if engine.send([STATUS]):
                break
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(frontend.receive(), 5) == [STATUS]
        assert engine.receive() is None
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


def test_frames_that_wait_come_together_in_order_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("rose.protocol.channel.EVENTS_PER_READ", 4)

    async def run():
        address = f"ipc://{tmp_path}/engine.sock"
        engine, frontend = EngineEndpoint(address), FrontendEndpoint(address)
        await frontend.send(_request("a"))
        await asyncio.to_thread(engine.receive, 5000)
        events = [TokensEvent(request_id="a", token_ids=[i]) for i in range(10)]
        for event in events:
            assert engine.send([event])
        await asyncio.sleep(0.1)
        turns = 0

        async def others():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        await asyncio.sleep(0)
        found = []
        for num_turns in (2, 3, 4):
            found.append(await asyncio.wait_for(frontend.receive(), 5))
            assert turns >= num_turns, "others run between two reads"
        task.cancel()
        assert found == [events[:4], events[4:8], events[8:]]
        frontend.close()
        engine.close()

    asyncio.run(run())


def test_a_broken_frame_does_not_take_those_around_it_along(tmp_path):
    async def run():
        address = f"ipc://{tmp_path}/engine.sock"
        engine, frontend = EngineEndpoint(address), FrontendEndpoint(address)
        await frontend.send(_request("a"))
        await asyncio.to_thread(engine.receive, 5000)
        (owner,) = engine._frontends
        before, after = (TokensEvent(request_id="a", token_ids=[i]) for i in (1, 2))
        engine.send([before])
        engine._transmit(owner, bytes([PROTOCOL_VERSION]) + b"\xc1")
        engine.send([after])
        await asyncio.sleep(0.1)
        assert await asyncio.wait_for(frontend.receive(), 5) == [before]
        with pytest.raises(ProtocolError, match="cannot be read"):
            await asyncio.wait_for(frontend.receive(), 5)
        assert await asyncio.wait_for(frontend.receive(), 5) == [after]
        frontend.close()
        engine.close()

    asyncio.run(run())


def test_an_id_belongs_to_the_frontend_that_used_it_first(tmp_path):
    async def run():
        address = f"ipc://{tmp_path}/engine.sock"
        engine = EngineEndpoint(address)
        first, second = FrontendEndpoint(address), FrontendEndpoint(address)
        await first.send(_request("x"))
        assert await asyncio.to_thread(engine.receive, 5000) == _request("x")
        await second.send(_request("x"))
        await second.send(Abort(request_id="x"))
        await second.send(_request("y"))
        assert await asyncio.to_thread(engine.receive, 5000) == _request("y"), "nothing else passes"
        [error] = await asyncio.wait_for(second.receive(), 5)
        assert (error.request_id, error.code) == ("x", "duplicate_request_id")
        assert "another frontend" in error.message
        last = [
            FinishedEvent(request_id="x", reason="stop", num_prompt_tokens=1, num_output_tokens=1)
        ]
        refusal = ErrorEvent(request_id="x", code="duplicate_request_id", message="")
        engine.send([refusal])  # the engine's own, of one frontend that used it twice
        engine.send(last)
        found = []
        while len(found) < 2:
            found += await asyncio.wait_for(first.receive(), 5)
        assert found == [refusal, *last]
        await second.send(_request("x"))
        assert await asyncio.to_thread(engine.receive, 5000) == _request("x"), "free again"
        for endpoint in (first, second, engine):
            endpoint.close()

    asyncio.run(run())
