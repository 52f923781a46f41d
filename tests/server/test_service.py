"""The engine service over the in-process channel: every request gets its last event, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest
import zmq

from fakes.model import FakeModel, expected_output
from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig
from rose.config.scheduler import SchedulerConfig
from rose.engine.engine import LLMEngine
from rose.protocol.channel import EngineEndpoint, FrontendEndpoint, LocalPair
from rose.protocol.event import EngineStatus, ErrorEvent, FinishedEvent, TokensEvent
from rose.protocol.request import Abort, Request, StatusQuery
from rose.protocol.sampling_params import SamplingParams
from rose.server.service import EngineService

LIMIT_SECONDS = 60
"""Of a whole test. One wait for a frame ends soon, but a service that lives sends a status each second: whoever waits
for a frame of another kind would wait without end."""


def _within_limit(test):
    asyncio.run(asyncio.wait_for(test, LIMIT_SECONDS))


class SlowModel(FakeModel):
    """Slow enough that a request of hundreds of tokens still runs when a loaded machine gets to the test."""

    def forward(self, token_ids_T, context):
        time.sleep(0.005)
        return super().forward(token_ids_T, context)


class Service:
    """A service in a thread, as it runs in a process."""

    def __init__(self, model):
        config = EngineConfig(
            model="fake",
            device="cpu",
            cache=CacheConfig(page_tokens=16, kv_tokens=512),
            scheduler=SchedulerConfig(max_step_tokens=64, max_mixed_tokens=64, max_sequences=8),
        )
        self.engine = LLMEngine.from_model(model, config)
        self.pair = LocalPair()
        self.frontend = self.pair.frontend()
        self.is_stopping = threading.Event()
        self.status = None
        service = EngineService(self.engine, self.pair.engine)
        self.thread = threading.Thread(
            target=lambda: setattr(self, "status", service.serve(self.is_stopping.is_set))
        )
        self.thread.start()

    async def events_until(self, done):
        events = []
        while not any(done(e) for e in events):
            events += await asyncio.wait_for(self.frontend.receive(), 10)
        return events

    async def stop(self):
        self.is_stopping.set()
        await asyncio.to_thread(self.thread.join, 10)
        return self.status


@contextlib.asynccontextmanager
async def _service(model=None):
    service = Service(model or FakeModel())
    try:
        yield service
    finally:
        await service.stop()
        service.frontend.close()
        service.pair.close()


def _request(name, prompt, max_tokens):
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0),
    )


def _ends(name):
    return lambda e: isinstance(e, FinishedEvent | ErrorEvent) and e.request_id == name


def _is_tokens(event):
    return isinstance(event, TokensEvent)


def _tokens(events, name):
    mine = [e for e in events if isinstance(e, TokensEvent) and e.request_id == name]
    return [t for e in mine for t in e.token_ids]


def test_requests_are_answered_with_their_tokens():
    async def run():
        async with _service() as service:
            await service.frontend.send(_request("a", [1, 2, 3], 9))
            await service.frontend.send(_request("b", [4] * 70, 5))
            events = await service.events_until(_ends("a"))
            events += (
                await service.events_until(_ends("b")) if not any(map(_ends("b"), events)) else []
            )
        assert _tokens(events, "a") == expected_output([1, 2, 3], 9)
        assert _tokens(events, "b") == expected_output([4] * 70, 5)

    _within_limit(run())


def test_the_service_says_that_it_is_ready_and_answers_queries():
    async def run():
        async with _service() as service:
            await service.events_until(lambda e: isinstance(e, EngineStatus) and e.is_ready)
            await service.frontend.send(StatusQuery())
            events = await service.events_until(lambda e: isinstance(e, EngineStatus))
        assert events[-1].context_tokens == 512

    _within_limit(run())


def test_refusals_and_aborts_are_answered():
    async def run():
        async with _service(SlowModel()) as service:
            await service.frontend.send(_request("long", [1] * 600, 1))
            [error] = [e for e in await service.events_until(_ends("long")) if _ends("long")(e)]
            assert error.code == "context_length_exceeded"
            await service.frontend.send(_request("a", [1], 400))
            await service.events_until(lambda e: isinstance(e, TokensEvent))
            await service.frontend.send(Abort(request_id="a"))
            events = await service.events_until(_ends("a"))
            assert [e.reason for e in events if _ends("a")(e)] == ["abort"]
            assert service.engine.table.num_used_pages == 0

    _within_limit(run())


def test_a_stop_tells_running_requests_that_the_engine_shuts_down():
    async def run():
        async with _service(SlowModel()) as service:
            await service.frontend.send(_request("a", [1], 400))
            await service.events_until(lambda e: isinstance(e, TokensEvent))
            assert await service.stop() == 0
            events = await service.events_until(_ends("a"))
            assert [e.code for e in events if _ends("a")(e)] == ["shutting_down"]
            assert events[-1].detail == "stopped"
            assert service.engine.table.num_used_pages == 0

    _within_limit(run())


def test_a_failing_step_answers_every_request_and_ends_the_service():
    class Failing(SlowModel):
        is_failing = False

        def forward(self, token_ids_T, context):
            if self.is_failing:
                raise RuntimeError("device lost")
            return super().forward(token_ids_T, context)

    async def run():
        model = Failing()
        async with _service(model) as service:
            for name in ("a", "b"):
                await service.frontend.send(_request(name, [1], 500))
            await service.events_until(lambda e: _is_tokens(e) and e.request_id == "b")
            model.is_failing = True
            events = await service.events_until(
                lambda e: isinstance(e, EngineStatus) and not e.is_ready
            )
            await asyncio.to_thread(service.thread.join, 10)
            assert service.status == 1
        errors = {e.request_id: e for e in events if isinstance(e, ErrorEvent)}
        assert set(errors) == {"a", "b"}
        assert all(
            e.code == "engine_failed" and "device lost" in e.message for e in errors.values()
        )

    _within_limit(run())


def test_a_failing_step_tells_who_had_begun_from_who_can_be_asked_again():
    class FailingLate(SlowModel):
        def forward(self, token_ids_T, context):
            if self.num_calls > 40:
                raise RuntimeError("device lost")
            return super().forward(token_ids_T, context)

    async def run():
        async with _service(FailingLate()) as service:
            for name in "abcdefghi":  # the service runs eight at a time
                await service.frontend.send(_request(name, [1], 500))
            events = await service.events_until(_ends("i"))
        codes = {e.request_id: e.code for e in events if isinstance(e, ErrorEvent)}
        assert codes == dict.fromkeys("abcdefgh", "engine_failed") | {"i": "engine_unavailable"}

    _within_limit(run())


def test_the_start_of_a_long_step_is_told_with_its_bound():
    async def run():
        async with _service(SlowModel()) as service:
            service.engine.clock.token_s = 0.02
            await service.frontend.send(_request("a", [1] * 50, 3))
            events = await service.events_until(_is_tokens)
            bounds = [e.step_bound_s for e in events if isinstance(e, EngineStatus)]
            assert max(bounds) >= 50 * 0.02
            events = await service.events_until(_ends("a"))
            while not (isinstance(events[-1], EngineStatus) and events[-1].num_running == 0):
                events += await service.frontend.receive()
            assert events[-1].step_bound_s == 0.0

    _within_limit(run())


def test_work_of_which_nothing_comes_ends_the_engine(monkeypatch):
    monkeypatch.setattr("rose.server.service.STUCK_SECONDS", 0.2)

    async def run():
        async with _service() as service:
            service.engine.scheduler.schedule = lambda: None
            await service.frontend.send(_request("a", [1], 5))
            events = await service.events_until(_ends("a"))
            await asyncio.to_thread(service.thread.join, 10)
            assert service.status == 1
        [error] = [e for e in events if isinstance(e, ErrorEvent)]
        assert error.code == "engine_unavailable"
        assert "0 sequences running and 1 waiting" in error.message

    _within_limit(run())


class Stalled(EngineEndpoint):
    """An endpoint whose frontend takes nothing for a while."""

    is_stalled = False

    def _transmit(self, frontend, frame):
        if self.is_stalled:
            raise zmq.Again
        super()._transmit(frontend, frame)


def test_a_frontend_that_comes_back_learns_that_its_requests_have_ended(tmp_path, caplog):
    config = EngineConfig(model="fake", device="cpu", cache=CacheConfig(kv_tokens=512))
    address = f"ipc://{tmp_path}/engine"

    async def run():
        endpoint, frontend = Stalled(address), FrontendEndpoint(address)
        service = EngineService(LLMEngine.from_model(FakeModel(), config), endpoint)
        for request in (_request("long", [1], 400), _request("short", [1], 2)):
            await frontend.send(request)
        await asyncio.sleep(0.05)
        turns = iter(range(6))

        def is_stopping():
            turn = next(turns)
            endpoint.is_stalled = 0 < turn < 4
            service._next_status = 0.0 if turn == 4 else service._next_status
            return turn == 5

        assert service.serve(is_stopping) == 0
        ends = {}
        while len(ends) < 2:
            for event in await asyncio.wait_for(frontend.receive(), 5):
                if isinstance(event, FinishedEvent | ErrorEvent):
                    ends[event.request_id] = event
        assert ends["long"].code == "engine_failed"
        assert "events of this request were lost" in ends["long"].message
        assert isinstance(ends["short"], FinishedEvent | ErrorEvent)
        [told] = [r for r in caplog.records if "a frontend takes no events; " in r.getMessage()]
        assert told.levelname == "WARNING"
        assert service.engine.table.num_used_pages == 0
        frontend.close()
        endpoint.close()

    _within_limit(run())


def test_requests_of_a_frontend_that_is_gone_are_dropped(caplog):
    caplog.set_level("INFO")

    async def run():
        async with _service(SlowModel()) as service:
            await service.frontend.send(_request("a", [1], 500))
            await service.events_until(lambda e: isinstance(e, TokensEvent))
            service.frontend.close()
            for _ in range(100):
                if not service.engine.has_work:
                    break
                await asyncio.sleep(0.05)
            assert service.engine.counters.num_output_tokens < 500
            assert service.engine.table.num_used_pages == 0
        [told] = [r for r in caplog.records if "frontend" in r.getMessage()]
        assert told.getMessage() == "a frontend has gone; its request ends"
        assert told.levelname == "INFO", "it may have been stopped"

    _within_limit(run())


@pytest.mark.parametrize("frame", [b"", b"\x09x", b"\x01\xc1"])
def test_a_broken_frame_is_told_and_survived(frame):
    async def run():
        async with _service() as service:
            await service.frontend._socket.send(frame)
            events = await service.events_until(lambda e: isinstance(e, EngineStatus) and e.detail)
            assert "frame" in events[-1].detail
            await service.frontend.send(_request("a", [1], 2))
            assert _tokens(await service.events_until(_ends("a")), "a") == expected_output([1], 2)

    _within_limit(run())


def test_requests_still_in_the_channel_are_refused_at_the_end():
    async def run():
        async with _service() as service:
            await service.stop()
            for name in ("a", "b"):
                await service.frontend.send(_request(name, [1], 1))
            await asyncio.sleep(0.05)
            EngineService(service.engine, service.pair.engine).serve(lambda: True)
            events = await service.events_until(_ends("b"))
        assert [e.code for e in events if isinstance(e, ErrorEvent)] == ["shutting_down"] * 2

    _within_limit(run())
