"""Further frontend processes: one that cannot be started is tried again; all say alike why an engine is gone."""

from __future__ import annotations

import asyncio
import signal
import sys

from fakes import engine as fake_engine
from rose.cli import frontends
from rose.frontend.client import EngineClient
from rose.frontend.config import FrontendConfig
from rose.protocol.event import TokensEvent
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams
from rose.server.scripted import ScriptLine


def _children(folder, said):
    """Return the only child of two frontends, of which what is announced is put into `said`."""
    spec = frontends.ChildSpec(
        config=FrontendConfig(frontends=2),
        model_folder=None,
        model_names=("m",),
        folder=str(folder),
        listener=0,
        log_level=0,
    )
    return frontends.Children(spec, announce=lambda kind, text: said.append((kind, text)))


def test_a_frontend_that_cannot_be_started_is_told_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(frontends, "RESTART_SECONDS", 0.01)
    said, tries = [], []
    right = asyncio.create_subprocess_exec

    async def start(*command, **options):
        tries.append(command)
        if len(tries) < 3:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await right("sleep", "60")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)

    async def scenario():
        children = _children(tmp_path, said)
        children.start()
        while not children._processes:
            await asyncio.sleep(0.01)
        children.stop()
        await children.finish()

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert len(tries) == 3
    assert [kind for kind, _ in said] == ["frontend"] * 2
    assert "cannot be started: [Errno 11] Resource temporarily unavailable" in said[0][1]


CHILD = """
import os, sys, time
from pathlib import Path
path = Path(sys.argv[1]) / f"counts-{os.getpid()}"
time.sleep(float(sys.argv[2]))
while True:
    path.touch()
    time.sleep(0.01)
"""


def test_a_frontend_that_is_stopped_is_killed_and_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(frontends, "RESTART_SECONDS", 0.01)
    monkeypatch.setattr(frontends, "LOOK_SECONDS", 0.1)
    said, started = [], []
    right = asyncio.create_subprocess_exec

    async def start(*_command, **_options):
        # Slow to start, longer than it may be silent later: that is no hang.
        words = (sys.executable, "-c", CHILD, str(tmp_path), "2.5")
        started.append(await right(*words))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)

    async def scenario():
        children = _children(tmp_path, said)
        children.start()
        while not list(tmp_path.glob("counts-*")):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert len(started) == 1
        started[0].send_signal(signal.SIGSTOP)
        while len(started) < 2:
            await asyncio.sleep(0.01)
        assert started[0].returncode == -signal.SIGKILL
        children.stop()
        await children.finish()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    words = "its process gave no sign of life for 2 s and was killed; starting it again"
    assert said == [("frontend", words)]


def _request(request_id, max_tokens):
    return Request(
        request_id=request_id,
        prompt_token_ids=[1],
        max_tokens=max_tokens,
        sampling=SamplingParams(),
        stop_token_ids=[],
    )


def test_why_an_engine_is_gone_is_told_though_the_next_is_there_at_once(tmp_path, monkeypatch):
    slow = ScriptLine(tokens=[7] * 1000, delay_ms=20)
    engines = {
        "first": fake_engine.FakeEngine(slow, ScriptLine(tokens=[7], delay_ms=60_000)),
        "second": fake_engine.FakeEngine(ScriptLine(tokens=[7, 8, 9])),
    }
    monkeypatch.setattr(frontends, "FrontendEndpoint", engines.__getitem__)

    async def read(client):
        async with client.submit(_request("b", 3)) as events:
            return [e async for e in events if isinstance(e, TokensEvent)]

    async def scenario():
        client = EngineClient(is_supervised=True)
        await client.start()
        frontends.EngineNotice(address="first").write(tmp_path)
        following = asyncio.create_task(frontends.Follower(tmp_path).keep(client))
        while not client.is_ready:
            await asyncio.sleep(0.001)
        async with client.submit(_request("a", 1000)) as begun:
            await anext(begun)
            waiting = asyncio.create_task(read(client))
            while len(engines["first"].requests) < 2:
                await asyncio.sleep(0.001)
            # Two notices within one look: what was told between them is not read.
            frontends.EngineNotice(address=None, reason="killed").write(tmp_path)
            frontends.EngineNotice(address="second", reason="killed").write(tmp_path)
            *_, last = [event async for event in begun]
        assert (last.code, last.message) == ("engine_failed", "the answer was cut off: killed")
        assert len(await waiting) == 3, "what had not begun goes to the next engine"
        assert [r.request_id for r in engines["second"].requests] == ["b"]
        following.cancel()
        await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))
