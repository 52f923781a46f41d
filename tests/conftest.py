"""Fixtures that several folders of tests share."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

# Tests run in several processes: torch's threads of one would wait for cores that another has, and small matrices took
# ten times as long. Servers that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# tests/ is no package (--import-mode=importlib); `from fakes import ...` is how tests reach the fakes.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def rose_logger():
    """What a command has set up for its own log lines ends with its test: its stream is closed by then."""
    logger = logging.getLogger("rose")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)


@pytest.fixture(scope="session")
def lab():
    """A frontend over a fake engine; imported late, so that kernel tests need no web framework."""
    from fakes import frontend

    return frontend.Lab
