"""Progress of long work on the terminal: bytes, rate and time left. Silent where nobody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a callback (bytes done, bytes in all, name) that draws a bar on standard error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[name]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, name="")

        def report(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, name=name)

        yield report
