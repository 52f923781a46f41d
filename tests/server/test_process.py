"""The engine as a process: announces itself, stops at SIGTERM, says why it could not start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig
from rose.protocol.channel import FrontendEndpoint
from rose.protocol.event import EngineStatus, ErrorEvent, TokensEvent
from rose.protocol.request import Request
from rose.server.launch import engine_command, read_config
from rose.utils.errors import ConfigError

LIMIT_SECONDS = 120
"""Of a whole conversation with a process that has to import torch first. One wait for a frame ends sooner, but an
engine that lives sends a status each second: whoever waits for another frame would wait without end."""

FAKE = """
import sys
sys.path[:0] = [{tests!r}]
import time
from fakes.model import FakeModel
from rose.config.engine import EngineConfig
from rose.engine.engine import LLMEngine
from rose.server.main import run
class SlowModel(FakeModel):
    def forward(self, *arguments):
        time.sleep(0.01)
        return super().forward(*arguments)
config = EngineConfig(model="fake", device="cpu")
sys.exit(run({address!r}, "fake", lambda report: LLMEngine.from_model(SlowModel(), config)))
"""


def _start(code, address):
    text = code.format(tests=str(Path(__file__).parents[1]), address=address)
    return subprocess.Popen([sys.executable, "-c", text], env=_environment())


def _environment():
    return os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "OMP_NUM_THREADS": "1",
    }


def _is_ready(event):
    return isinstance(event, EngineStatus) and event.is_ready


def test_a_process_serves_until_sigterm_and_then_ends_its_requests(tmp_path):
    address = f"ipc://{tmp_path}/engine.sock"

    async def run():
        frontend = FrontendEndpoint(address)
        request = Request(request_id="a", prompt_token_ids=[1, 2], max_tokens=500)
        await frontend.send(request)
        events = []
        while not (any(map(_is_ready, events)) and any(isinstance(e, TokensEvent) for e in events)):
            events += await asyncio.wait_for(frontend.receive(), 60)
        process.send_signal(signal.SIGTERM)
        while not any(isinstance(e, ErrorEvent) for e in events):
            events += await asyncio.wait_for(frontend.receive(), 10)
        frontend.close()
        return events

    process = _start(FAKE, address)
    try:
        events = asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))
        assert process.wait(10) == 0
    finally:
        process.kill()
    assert [e.code for e in events if isinstance(e, ErrorEvent)] == ["shutting_down"]


@pytest.mark.parametrize("is_supervised", [True, False])
def test_a_model_that_is_not_there_ends_the_start_with_the_reason(tmp_path, is_supervised):
    address = f"ipc://{tmp_path}/engine.sock"
    command = engine_command(
        EngineConfig(model=str(tmp_path / "nowhere"), device="cpu"),
        address,
        stop_with_parent=is_supervised,
    )

    async def run():
        frontend = FrontendEndpoint(address)
        details = []
        while not any("failed" in d for d in details):
            details += [e.detail for e in await asyncio.wait_for(frontend.receive(), 60)]
        frontend.close()
        return details

    process = subprocess.Popen(command, env=_environment(), stderr=subprocess.PIPE, text=True)
    try:
        details = asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 2
    assert "nowhere" in details[-1]
    # A supervisor prints what it was told over the channel; without one the log says it.
    assert ("nowhere" in errors) is not is_supervised
    assert "Traceback" not in errors


def test_the_configuration_survives_the_command_line():
    config = EngineConfig(model="m", context_tokens=77, cache=CacheConfig(page_tokens=32))
    command = engine_command(config, "ipc:///x")
    assert read_config(command[command.index("--config") + 1]) == config


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"model": "m", "cache": {"page_size": 4}}', "unknown field cache.page_size"),
        ('{"model": 5}', "cannot be read"),
        ("{", "cannot be read"),
    ],
)
def test_a_wrong_configuration_is_refused(text, reason):
    with pytest.raises(ConfigError, match=reason):
        read_config(text)


def test_the_command_is_made_without_torch():
    code = "import sys, rose.server.launch; assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=_environment(), timeout=LIMIT_SECONDS
    )
