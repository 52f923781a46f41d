"""Several frontend processes in front of one engine: they share the listening socket and the engine's channel.

The first runs in `rose serve` itself and keeps the engine; the others are children that follow what it says of the
engine in a file of the private folder. A child that ends is started again, and one that gives no sign of life any more
is killed first; a signal to `rose serve` reaches them all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rose.cli.processes import death_words
from rose.frontend.client import EngineClient
from rose.frontend.config import FrontendConfig
from rose.frontend.main import Announce
from rose.frontend.siblings import counts_path
from rose.protocol.channel import ENGINE_NOTICE, FrontendEndpoint
from rose.utils.log import configure_logging, get_logger
from rose.utils.process import end_with_parent

POLL_SECONDS = 0.05
RESTART_SECONDS = 1.0
KILL_SECONDS = 10.0
"""Beyond the time in which answers may finish."""
LOOK_SECONDS = 1.0
"""From one look at a child's sign of life to the next: a child gives about one a second."""
MAX_SILENT_LOOKS = 20
"""In a row, before a child counts as hung. Looks, not seconds: while the whole machine stands still nobody looks."""

logger = get_logger(__name__)


class EngineNotice(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine there is, and why the one before it is gone."""

    address: str | None
    """None: there is none."""
    reason: str = ""
    """Empty before the first is gone."""

    def write(self, folder: Path) -> None:
        """Tell the children."""
        draft = folder / "engine.draft"
        draft.write_bytes(msgspec.json.encode(self))
        draft.replace(folder / ENGINE_NOTICE)


class Follower:
    """Follows the engines that another process keeps."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ENGINE_NOTICE

    async def keep(self, client: EngineClient) -> str:
        """Attach the client to each engine there is; never returns."""
        seen = None
        while True:
            raw = self._path.read_bytes() if self._path.exists() else None
            if raw is not None and raw != seen:
                seen = raw
                notice = msgspec.json.decode(raw, type=EngineNotice)
                # With the next engine's address too: where that comes at once, the notice without one is not seen.
                if notice.reason:
                    client.mark_dead(notice.reason)
                if notice.address is not None:
                    client.attach(FrontendEndpoint(notice.address))
            await asyncio.sleep(POLL_SECONDS)


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is started with; the file is readable for this user alone."""

    config: FrontendConfig
    model_folder: str | None
    model_names: tuple[str, ...]
    folder: str
    listener: int
    """File descriptor of the listening socket."""
    log_level: int


class Children:
    """The frontends beside the first; `Frontend` stops them with itself."""

    def __init__(self, spec: ChildSpec, *, announce: Announce) -> None:
        self._spec = spec
        self._announce = announce
        self._is_stopping = False
        self._processes: set[asyncio.subprocess.Process] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start them, each again when it ends."""
        path = Path(self._spec.folder) / "frontend.json"
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(self._spec))
        command = [sys.executable, "-m", "rose.cli.frontends", str(path)]
        count = self._spec.config.frontends - 1
        self._tasks = [asyncio.create_task(self._keep(command)) for _ in range(count)]

    def stop(self) -> None:
        """Pass a signal on: they finish their answers; a second time they do not."""
        self._is_stopping = True
        for process in self._processes:
            if process.returncode is None:
                process.terminate()

    async def finish(self) -> None:
        """Wait until all have ended, and make them where they take too long."""
        if not self._is_stopping:
            self.stop()
        for task in self._tasks:
            if not self._processes:
                task.cancel()
        patience_s = self._spec.config.shutdown_timeout_s + KILL_SECONDS
        _, late = await asyncio.wait(self._tasks, timeout=patience_s)
        if late:
            for process in self._processes:
                process.kill()
            await asyncio.wait(late)

    async def _keep(self, command: Sequence[str]) -> None:
        while not self._is_stopping:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(self._spec.listener,),
                    start_new_session=True,
                    preexec_fn=end_with_parent if sys.platform == "linux" else None,
                )
            except OSError as error:  # no memory, no process number: it may pass
                self._announce("frontend", f"it cannot be started: {error}; trying again")
                await asyncio.sleep(RESTART_SECONDS)
                continue
            self._processes.add(process)
            if self._is_stopping:
                process.terminate()
            hang = await self._until_lost(process)
            code = await process.wait()
            self._processes.discard(process)
            if not self._is_stopping:
                why = hang or death_words("its process", code)
                self._announce("frontend", f"{why}; starting it again")
                await asyncio.sleep(RESTART_SECONDS)

    async def _until_lost(self, process: asyncio.subprocess.Process) -> str | None:
        """Wait until a child has ended, or kill it where it hangs: stopped, or stuck in one thing; return why then.

        While it starts it may take its time. One that finishes its answers is left to `finish`.
        """
        path = counts_path(Path(self._spec.folder), process.pid)
        ended = asyncio.ensure_future(process.wait())
        seen, num_silent = _sign(path), None
        while not (await asyncio.wait([ended], timeout=LOOK_SECONDS))[0]:
            sign = _sign(path)
            if sign != seen:
                seen, num_silent = sign, 0
            elif num_silent is not None and not self._is_stopping:
                num_silent += 1
                if num_silent >= MAX_SILENT_LOOKS:
                    process.kill()
                    return f"its process gave no sign of life for {num_silent * LOOK_SECONDS:g} s and was killed"
        return None


def _sign(path: Path) -> int | None:
    """Return when a child published last; None where it has not yet."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def shared_config(config: FrontendConfig, folder: Path) -> FrontendConfig:
    """Return the configuration of frontends that answer for each other: what one keeps, the others find."""
    changes: dict[str, str] = {}
    if config.response_store == "memory":
        changes["response_store"] = str(folder / "responses")
    if not config.responses_key_file:
        path = folder / "responses.key"
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
        changes["responses_key_file"] = str(path)
    return dataclasses.replace(config, **changes)


def main(path: Path) -> int:
    """Run one child."""
    from rose.frontend.formatters.registry import build_formatter
    from rose.frontend.jobs import Formatters
    from rose.frontend.main import Frontend, new_event_loop
    from rose.frontend.tokenizer import load_tokenizer

    spec = msgspec.json.decode(path.read_bytes(), type=ChildSpec)
    configure_logging(logging.getLevelName(spec.log_level))
    tokenizer = load_tokenizer(None if spec.model_folder is None else Path(spec.model_folder))
    formatters = Formatters(
        chat=build_formatter(spec.config.formatter, tokenizer),
        text=build_formatter("plain", tokenizer),
    )
    folder = Path(spec.folder)
    frontend = Frontend(
        spec.config,
        formatters=formatters,
        model_names=spec.model_names,
        announce=lambda kind, text: logger.debug("frontend %d: %s %s", os.getpid(), kind, text),
        shared_folder=folder,
    )
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        listener = socket.socket(fileno=spec.listener)
        return runner.run(frontend.run(Follower(folder).keep, listener=listener))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
