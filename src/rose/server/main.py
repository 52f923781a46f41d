"""The process of the engine service: load, announce, serve, end. Started by `rose serve` or by hand.

Exit status: 0 stopped by SIGTERM or SIGINT, 1 a step failed, 2 could not start.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from collections.abc import Callable

from rose.config.engine import EngineConfig
from rose.engine.engine import LLMEngine
from rose.protocol.channel import EngineEndpoint
from rose.protocol.event import EngineStatus
from rose.server.launch import read_config
from rose.server.service import EngineService
from rose.utils.errors import RoseError
from rose.utils.log import configure_logging, get_logger

REPORT_SECONDS = 0.5
FAREWELL_SECONDS = 1.0
"""A start may fail before the frontend has connected; the reason should still reach it."""

_logger = get_logger("rose.server.main")  # __name__ is "__main__" where it runs as a process


class Announcer:
    """Tells the frontend what is being done while there is no engine yet."""

    def __init__(self, endpoint: EngineEndpoint, model: str) -> None:
        self._endpoint = endpoint
        self._model = model
        self._next = 0.0

    def report(self, detail: str) -> None:
        """Log and send, at most twice a second."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + REPORT_SECONDS
            self.announce(detail)

    def announce(self, detail: str) -> None:
        """Log and send."""
        _logger.info("%s", detail)
        self.tell(detail)

    def tell(self, detail: str, *, wait_seconds: float = 0.0) -> bool:
        """Send, and return whether a frontend was there; where none is yet, wait so long for one."""
        status = EngineStatus(
            is_ready=False, model=self._model, context_tokens=0, vocab_size=0, detail=detail
        )
        end = time.monotonic() + wait_seconds
        while not self._endpoint.send([status]):
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)
        return True


class StopSignal:
    """SIGTERM and SIGINT: a flag while serving, an exit while loading, which cannot look at flags."""

    def __init__(self, *, stop_with_parent: bool) -> None:
        self._is_set = False
        self._parent = os.getppid() if stop_with_parent else None
        self.is_serving = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def __call__(self) -> bool:
        """Tell whether to stop: it was asked for, or the process that was to be followed is gone."""
        return self._is_set or (self._parent is not None and os.getppid() != self._parent)

    def _receive(self, _number: int, _frame: object) -> None:
        self._is_set = True
        if not self.is_serving:
            raise SystemExit(0)


def run(
    address: str,
    model: str,
    build: Callable[[Callable[[str], None]], LLMEngine],
    *,
    stop_with_parent: bool = False,
) -> int:
    """Build an engine and serve it at `address`; return the exit status.

    Units    build(report) makes the engine and reports in words what it is doing
    """
    stop = StopSignal(stop_with_parent=stop_with_parent)
    endpoint = EngineEndpoint(address)
    announcer = Announcer(endpoint, model)
    try:
        begin = time.monotonic()
        announcer.announce("starting")
        try:
            engine = build(announcer.report)
            engine.measure_steps()
        except Exception as error:
            is_told = announcer.tell(f"failed: {error}", wait_seconds=FAREWELL_SECONDS)
            if not isinstance(error, RoseError):
                raise
            if not (is_told and stop_with_parent):
                # Who supervises prints what it was told; nobody reads the same twice.
                _logger.critical("%s", error)
            return 2
        engine.start_s = time.monotonic() - begin
        # What was built stays: collections need not look at it again, which takes tens of milliseconds.
        gc.collect()
        gc.freeze()
        stop.is_serving = True
        _logger.info("ready after %.1f s at %s", engine.start_s, address)
        return EngineService(engine, endpoint).serve(stop)
    finally:
        endpoint.close()


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m rose.server.main", description=__doc__)
    parser.add_argument(
        "--channel", required=True, help="address to serve: ipc://PATH or tcp://HOST:PORT"
    )
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument(
        "--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR")
    )
    parser.add_argument(
        "--stop-with-parent", action="store_true", help="end when the parent process is gone"
    )
    options = parser.parse_args(arguments)
    configure_logging(options.log_level)
    try:
        config: EngineConfig = read_config(options.config)
        return run(
            options.channel,
            config.model,
            lambda report: LLMEngine.from_config(config, report=report),
            stop_with_parent=options.stop_with_parent,
        )
    except RoseError as error:
        _logger.critical("%s", error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
