"""Keeps one engine running: starts it, watches it, kills it when it hangs, starts it again a bounded number of times.

Stands between `rose serve`, which knows how to start an engine, and the frontend's client, which knows whether it
makes progress. Every engine gets a channel of its own, so that nothing meant for one reaches the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rose.cli.processes import EngineProcess, engine_process
from rose.frontend.client import EngineClient
from rose.frontend.main import FAILED_PREFIX, Announce
from rose.protocol.channel import FrontendEndpoint

STEADY_SECONDS = 60.0
"""An engine that was ready for so long has its past forgiven."""
LONGEST_PAUSE_SECONDS = 30.0
POLL_SECONDS = 0.05


def pause_before(restart: int) -> float:
    """Return the seconds to wait before the nth restart in a row: none, then 1, 2, 4 up to half a minute."""
    return 0.0 if restart <= 1 else min(LONGEST_PAUSE_SECONDS, 2.0 ** (restart - 2))


class Supervisor:
    """Runs engines one after the other."""

    def __init__(
        self,
        command: Callable[[str, Path], Sequence[str]],
        folder: Path,
        *,
        max_restarts: int,
        announce: Announce,
        tell: Callable[[str | None, str], None] = lambda _address, _reason: None,
    ) -> None:
        self._command = command
        self._folder = folder
        self._max_restarts = max_restarts
        self._announce = announce
        self._tell = tell
        """Called with the address of each engine that is started and why the one before it is gone, empty for the
        first; and with None and why when one is gone."""
        self._num_engines = 0
        self._loss = ""
        """Why the last engine is gone."""
        self.refusal_code: int | None = None
        """Exit code of a first engine that never became ready; None where it worked, or still may."""

    async def keep(self, client: EngineClient) -> str:
        """Run engines for the client; return why the last one gets no successor."""
        num_failures = 0
        while True:
            reason, ready_s = await self._run_one(client)
            if ready_s is None and self._num_engines == 1:
                return reason  # it never worked: starting it again would say the same
            num_failures = (
                1 if ready_s is not None and ready_s > STEADY_SECONDS else num_failures + 1
            )
            if client.is_draining:
                return reason
            if num_failures > self._max_restarts:
                times = "once" if num_failures == 2 else f"{num_failures - 1} times"
                return reason if num_failures == 1 else f"{reason}; it was started again {times}"
            pause_s = pause_before(num_failures)
            when = f" in {pause_s:g} s" if pause_s else ""
            self._announce(
                "restarting",
                f"{reason}; starting it again{when} ({num_failures} of {self._max_restarts})",
            )
            await asyncio.sleep(pause_s)

    async def _run_one(self, client: EngineClient) -> tuple[str, float | None]:
        """Run one engine to its end; return why it ended and how long it had been ready, None where it never was."""
        self._num_engines += 1
        address = f"ipc://{self._folder}/engine-{self._num_engines}"
        async with engine_process(self._command(address, self._folder)) as engine:
            client.attach(FrontendEndpoint(address))
            self._tell(address, self._loss)
            ready_since = await _until_lost(engine, client)
            hang = None if engine.death.done() else client.hang()
            if hang is not None:
                # Told first: a process that waits for a device may take a while to go.
                client.mark_dead(hang)
                await engine.kill()
            if ready_since is None and self._num_engines == 1:
                self.refusal_code = engine.exit_code
            reason = hang or engine.death.result()
        detail = client.status.detail if client.status else ""
        if ready_since is None and detail.startswith(FAILED_PREFIX):
            reason = detail.removeprefix(FAILED_PREFIX)
        self._loss = reason
        client.mark_dead(reason)
        self._tell(None, reason)
        return reason, None if ready_since is None else time.monotonic() - ready_since


async def _until_lost(engine: EngineProcess, client: EngineClient) -> float | None:
    """Wait until the engine has ended or hangs; return when it became ready."""
    ready_since = None
    while not engine.death.done() and client.hang() is None:
        if ready_since is None and client.has_been_ready:
            ready_since = time.monotonic()
        await asyncio.wait([engine.death], timeout=POLL_SECONDS)
    # It may have been ready and gone between two looks.
    return ready_since or (time.monotonic() if client.has_been_ready else None)
