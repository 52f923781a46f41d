"""What a long measurement says of itself: a moving line on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


class BenchProgress:
    """Shows which cell runs, how many are left and for how long it has been going; on standard error."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=self.console,
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("", total=None)
        self._begin = time.perf_counter()

    @property
    def is_moving(self) -> bool:
        """Whether a line is redrawn; if not, every word stays and should be worth it."""
        return not self._bar.disable

    def expect(self, cells: int) -> None:
        """Say how many cells there will be."""
        self._bar.update(self._task, total=cells, completed=0)

    def now(self, text: str) -> None:
        """Say what runs now."""
        self._bar.update(self._task, description=text)
        if self._bar.disable:
            seconds = time.perf_counter() - self._begin
            self.say(f"[{seconds:7.1f} s] {text}")

    def done(self, text: str) -> None:
        """Count a cell and keep a line about it."""
        self._bar.advance(self._task)
        self.say(text)

    def say(self, text: str) -> None:
        """Keep a line of text."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def running(self) -> Iterator[BenchProgress]:
        """Show the line inside the block."""
        with self._bar:
            yield self
