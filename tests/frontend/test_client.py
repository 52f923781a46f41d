"""The engine client: routing, aborting, noticing death; over a fake engine and over the real channel."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest

from fakes import engine as fake_engine
from rose.frontend.client import EngineClient
from rose.frontend.errors import RequestError
from rose.protocol.channel import LocalPair
from rose.protocol.codec import ProtocolError
from rose.protocol.event import ErrorEvent, FinishedEvent, TokensEvent
from rose.protocol.request import Request
from rose.server.scripted import ScriptConfig, ScriptedEngine, ScriptLine


def _request(name, max_tokens=100):
    return Request(request_id=name, prompt_token_ids=[1], max_tokens=max_tokens)


async def _ready(client):
    await client.start()
    while not client.is_ready:
        await asyncio.sleep(0.001)


def _run(scenario):
    return asyncio.run(asyncio.wait_for(scenario(), 20))


def test_events_of_several_requests_come_from_one_submission():
    async def scenario():
        client = EngineClient(fake_engine.FakeEngine(ScriptLine(tokens=[1, 2, 3])))
        await _ready(client)
        async with client.submit(_request("a"), _request("b")) as events:
            seen = [event async for event in events]
        for name in "ab":
            mine = [event for event in seen if event.request_id == name]
            assert [type(event) for event in mine] == [TokensEvent] * 3 + [FinishedEvent]
        assert client.num_open == 0
        await client.close()

    _run(scenario)


def test_leaving_early_aborts_what_still_runs():
    async def scenario():
        engine = fake_engine.FakeEngine(ScriptLine(tokens=[1] * 1000, delay_ms=1))
        client = EngineClient(engine)
        await _ready(client)
        async with client.submit(_request("a"), _request("b")) as events:
            async for _ in events:
                break
        await asyncio.sleep(0)
        assert sorted(engine.aborted) == ["a", "b"]
        assert engine.scripted.status().num_running == 0
        assert client.num_open == 0
        await client.close()
        assert engine.is_closed

    _run(scenario)


def test_a_cancelled_reader_aborts_too():
    async def scenario():
        engine = fake_engine.FakeEngine(ScriptLine(tokens=[1] * 1000, delay_ms=1))
        client = EngineClient(engine)
        await _ready(client)

        async def read():
            async with client.submit(_request("a")) as events:
                async for _ in events:
                    pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert engine.aborted == ["a"]
        await client.close()

    _run(scenario)


@pytest.mark.parametrize("how", ["death", "broken frame", "close"])
def test_open_requests_end_with_an_error(how):
    async def scenario():
        engine = fake_engine.FakeEngine(ScriptLine(tokens=[1] * 1000, delay_ms=1))
        client = EngineClient(engine)
        await _ready(client)
        async with client.submit(_request("a")) as events:
            first = await anext(aiter(events))
            assert isinstance(first, TokensEvent)
            if how == "death":
                client.mark_dead("killed")
            elif how == "close":
                await client.close()
            else:

                async def broken():
                    engine.receive = type(engine).receive.__get__(engine)
                    raise ProtocolError("version 9")

                engine.receive = broken
            *_, last = [event async for event in events]
        assert isinstance(last, ErrorEvent)
        assert last.code == ("shutting_down" if how == "close" else "engine_failed")
        if how == "death":
            with pytest.raises(RequestError, match="killed"):
                client.submit(_request("b"))
        if how != "close":
            await client.close()

    _run(scenario)


def test_a_request_over_the_real_channel():
    pair = LocalPair()
    engine = ScriptedEngine(ScriptConfig(address="", model="m", lines=[ScriptLine(tokens=[5, 6])]))
    stop = threading.Event()

    def serve():
        while not stop.is_set():
            message = pair.engine.receive(5)
            events = engine.take(message, 0.0) if message is not None else []
            events += engine.step(0.0)
            if events:
                pair.engine.send(events)

    thread = threading.Thread(target=serve)
    thread.start()

    async def scenario():
        client = EngineClient(pair.frontend())
        await _ready(client)
        async with client.submit(_request("a")) as events:
            seen = [event async for event in events]
        assert [e.token_ids for e in seen if isinstance(e, TokensEvent)] == [[5], [6]]
        await client.close()

    try:
        _run(scenario)
    finally:
        stop.set()
        thread.join()
        pair.close()


def _engine(**fields):
    return fake_engine.FakeEngine(ScriptLine(tokens=[7, 8, 9], **fields))


async def _supervised(engine):
    client = EngineClient(is_supervised=True)
    await client.start()
    client.attach(engine)
    while not client.is_ready:
        await asyncio.sleep(0.001)
    return client


async def _read(client, *names):
    async with client.submit(*map(_request, names)) as events:
        return [event async for event in events]


@pytest.mark.parametrize("is_poison", [False, True])
def test_what_was_not_begun_goes_to_the_next_engine_once(is_poison):
    async def scenario():
        client = await _supervised(_engine(delay_ms=60_000))
        reader = asyncio.create_task(_read(client, "a", "b"))
        await asyncio.sleep(0.01)
        client.mark_dead("killed")
        assert client.problem() == "killed"
        await asyncio.sleep(0.01)
        assert not reader.done()
        second = _engine(delay_ms=60_000 if is_poison else 0)
        client.attach(second)
        assert "started again" in (client.problem() or "")
        while not client.is_ready:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert [r.request_id for r in second.requests] == ["a", "b"]
        if is_poison:
            client.mark_dead("killed again")
        events = await reader
        if is_poison:
            assert [e.code for e in events] == ["engine_unavailable"] * 2
            assert "killed again" in events[0].message
        else:
            tokens = [t for e in events if isinstance(e, TokensEvent) for t in e.token_ids]
            assert sorted(tokens) == [7, 7, 8, 8, 9, 9]
        assert client.num_open == 0
        await client.close()

    _run(scenario)


def test_what_had_begun_is_not_sent_again():
    async def scenario():
        client = await _supervised(_engine(delay_ms=20))
        reader = asyncio.create_task(_read(client, "a"))
        await asyncio.sleep(0.03)
        client.mark_dead("killed")
        *_, last = await reader
        assert last.code == "engine_failed"
        second = _engine()
        client.attach(second)
        while not client.is_ready:
            await asyncio.sleep(0.001)
        assert second.requests == []
        await client.close()

    _run(scenario)


def test_nobody_waits_for_ever_for_the_next_engine(monkeypatch):
    monkeypatch.setattr("rose.frontend.client.AGAIN_SECONDS", 0.2)

    async def scenario():
        client = await _supervised(_engine(delay_ms=60_000))
        reader = asyncio.create_task(_read(client, "a"))
        await asyncio.sleep(0.01)
        client.mark_dead("killed")
        client.attach(fake_engine.FakeEngine(is_ready=False))
        [error] = await asyncio.wait_for(reader, 4)  # less than it is without the line above
        assert error.code == "engine_unavailable"
        assert error.message == (
            "the engine was lost before this request had begun (killed); send the request again"
        )
        await client.close()

    _run(scenario)


def test_a_client_that_leaves_while_its_request_is_held_is_forgotten():
    async def scenario():
        client = await _supervised(_engine(delay_ms=60_000))
        reader = asyncio.create_task(_read(client, "a"))
        await asyncio.sleep(0.01)
        client.mark_dead("killed")
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        assert client.num_open == 0
        second = _engine()
        client.attach(second)
        while not client.is_ready:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert second.requests == []
        await client.close()

    _run(scenario)


def test_a_long_step_is_no_hang_and_a_draining_server_takes_nothing():
    async def scenario():
        engine = _engine()
        client = EngineClient(engine, timeout_s=0.1)
        await _ready(client)

        async def silent():
            await asyncio.sleep(60)
            return []

        assert client.status is not None
        client.status = msgspec.structs.replace(client.status, step_bound_s=10.0)
        engine.receive = silent
        await asyncio.sleep(0.4)
        assert client.hang() is None
        client.status = msgspec.structs.replace(client.status, step_bound_s=0.01)
        assert "no progress" in (client.hang() or "")
        assert "--engine-timeout" in (client.hang() or "")
        client.drain()
        assert not client.is_ready
        with pytest.raises(RequestError, match="shutting down"):
            client.submit(_request("b"))
        await client.close()

    _run(scenario)
