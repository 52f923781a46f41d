"""The engine as a child process that is never left behind, and a private folder for its socket."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from rose.utils.process import end_with_parent

STOP_SECONDS = 10.0
"""How long an engine may take to end after SIGTERM; a CUDA context takes about one. Guessed."""
_SWEEP = """
import os, shutil, sys, time
sys.stdin.buffer.read()
for _ in range(100):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)
"""
"""Standard input ends with the process that holds its other end, nobody else has it. Whoever was served by that process
may write for a moment more."""


class EngineProcess:
    """One running engine."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.death: asyncio.Future[str] = asyncio.ensure_future(self._wait())
        """Resolves to the reason, in words, when the process has ended."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative is the signal that killed it."""
        return self._process.returncode

    async def stop(self) -> None:
        """Ask the process to end, then make it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(asyncio.shield(self.death), STOP_SECONDS)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End the process now; one that was stopped or hangs takes no other signal."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.shield(self.death)

    async def _wait(self) -> str:
        return death_words("the engine's process", await self._process.wait())


def death_words(what: str, code: int) -> str:
    """Return how a process ended, in words; a negative code is the signal that killed it."""
    if code < 0:
        return f"{what} was killed by {signal.Signals(-code).name}"
    return f"{what} ended with exit code {code}"


@contextlib.asynccontextmanager
async def engine_process(command: Sequence[str]) -> AsyncIterator[EngineProcess]:
    """Run a command that serves the channel; it is ended with the block."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        # A session of its own: Ctrl-C reaches the frontend alone, which then ends the engine in order.
        start_new_session=True,
        preexec_fn=end_with_parent if sys.platform == "linux" else None,
    )
    engine = EngineProcess(process)
    try:
        yield engine
    finally:
        await engine.stop()


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Return a folder only this user can enter, for sockets, keys and answers; removed with the block.

    Also where this process is killed in the block: a small process waits for its end and removes what it leaves.
    """
    folder = tempfile.mkdtemp(prefix="rose-")
    sweeper = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SWEEP, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,  # neither Ctrl-C nor a closed terminal ends it first
    )
    try:
        yield Path(folder)
    finally:
        assert sweeper.stdin is not None
        sweeper.stdin.close()
        sweeper.wait()
        shutil.rmtree(folder, ignore_errors=True)  # it may have been killed too
