"""Folders that checkpoints are written into: empty or ours, with space foreseen."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rose.utils.errors import CheckpointError

SPARE_BYTES = 64 << 20
"""Left free beyond what is to be written: configuration files and the journal."""


SHOWN_NAMES = 4


def some(names: list[str]) -> str:
    """Return the first names and how many more there are, for a message."""
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def require_empty(folder: Path, *, because: str) -> None:
    """Create a folder, or accept an empty one.

    Raises  CheckpointError where something is in it or in its place.
    """
    make(folder, because=because)
    names = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
    if names:
        raise CheckpointError(
            f"{folder} is not empty (found: {some(names)}); {because} needs an empty or new folder; "
            "choose another or remove what is there"
        )


def make(folder: Path, *, because: str) -> None:
    """Create a folder where there is none.

    Raises  CheckpointError where something is in its place, or it cannot be made.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(
                f"{folder} is a file; a folder is needed for {because}; choose another"
            )
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{str(folder)[:400]} cannot be made ({reason}); {because} needs a folder it may write; choose another"
        ) from None


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep other processes that ask for the same from writing into a folder; a killed process keeps nobody out.

    Raises  CheckpointError where another one is at work there.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(
                f"another process is writing into {folder}; one at a time may; wait for it, or choose another folder"
            ) from None
        yield
    finally:
        os.close(descriptor)


def require_space(folder: Path, num_bytes: int) -> None:
    """Foresee a full disk.

    Raises  CheckpointError where less is free than is needed.
    """
    free = shutil.disk_usage(folder).free
    if num_bytes + SPARE_BYTES > free:
        raise CheckpointError(
            f"{folder} needs {gib(num_bytes + SPARE_BYTES)} of disk, {gib(free)} are free; "
            "free some space or choose a folder on another disk"
        )


def gib(num_bytes: float) -> str:
    """Write a number of bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"
