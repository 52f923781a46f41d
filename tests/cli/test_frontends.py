"""Further frontend processes: one that cannot be started is tried again."""

from __future__ import annotations

import asyncio

from rose.cli import frontends
from rose.frontend.config import FrontendConfig


def test_a_frontend_that_cannot_be_started_is_told_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(frontends, "RESTART_SECONDS", 0.01)
    said, tries = [], []
    spec = frontends.ChildSpec(
        config=FrontendConfig(frontends=2),
        model_folder=None,
        model_names=("m",),
        folder=str(tmp_path),
        listener=0,
        log_level=0,
    )
    right = asyncio.create_subprocess_exec

    async def start(*command, **options):
        tries.append(command)
        if len(tries) < 3:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await right("sleep", "60")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)

    async def scenario():
        children = frontends.Children(spec, announce=lambda kind, text: said.append((kind, text)))
        children.start()
        while not children._processes:
            await asyncio.sleep(0.01)
        children.stop()
        await children.finish()

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert len(tries) == 3
    assert [kind for kind, _ in said] == ["restarting"] * 2
    assert "cannot be started: [Errno 11] Resource temporarily unavailable" in said[0][1]
