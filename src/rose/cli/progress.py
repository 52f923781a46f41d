"""What a long-running command says of its state: a moving line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

WORDS = {
    "listening": "listening on",
    "loading": "loading:",
    "ready": "ready:",
    "restarting": "engine lost:",
    "frontend": "frontend lost:",
    "stopping": "stopping:",
    "failed": "error:",
}


class Announcer:
    """Prints states to standard error; a callable of kind and text."""

    def __init__(self, *, worded: Callable[[str], str] = str, is_moving: bool = True) -> None:
        self._worded = worded
        """What an error says, in the words of the command line."""
        self._spinner: Any = None
        # Another process that logs to the same terminal would write into the moving line.
        if is_moving and sys.stderr.isatty():
            from rich.console import Console

            self._spinner = Console(stderr=True).status("starting the engine")
            self._spinner.start()

    def __call__(self, kind: str, text: str) -> None:
        """Show one state."""
        line = f"{WORDS[kind]} {self._worded(text) if kind == 'failed' else text}"
        if kind == "loading":
            # Without a terminal the engine's own log lines say the same.
            if self._spinner is not None:
                self._spinner.update(line)
            return
        if kind in ("ready", "stopping", "failed"):
            self.close()
        for each in line.splitlines():
            click.echo(each, err=True)

    def close(self) -> None:
        """Take the moving line away."""
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None
