"""One logger factory for both services; each line carries the rank."""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(asctime)s %(levelname).1s {rank}%(name)s: %(message)s"


def configure_logging(level: str = "INFO", *, rank: int | None = None) -> None:
    """Send log lines of all `rose` loggers to standard error; called once by each `main`."""
    prefix = "" if rank is None else f"rank{rank} "
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT.format(rank=prefix), "%H:%M:%S"))
    root = logging.getLogger("rose")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


def get_logger(name: str) -> logging.Logger:
    """Return the logger of one module; pass `__name__`."""
    return logging.getLogger(name)
