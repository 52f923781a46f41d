"""Processes that are ended from outside: children go with their parent, a parent clears up."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

PR_SET_PDEATHSIG = 1
"""linux/prctl.h: signal to send to this process when its parent ends."""


def end_with_parent() -> None:
    """End this process with its parent; runs in the child before exec, on Linux."""
    # A parent that is killed hard must not leave a GPU occupied.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def clearing_up() -> Iterator[None]:
    """Let SIGTERM and SIGHUP leave the block as SystemExit, so that what it holds is cleared up.

    A signal that is ignored (nohup) stays so. Only the main thread may set them.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
