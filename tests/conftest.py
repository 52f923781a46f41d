"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Tests run in several processes: torch's threads of one would wait for cores that another has, and small matrices took
# ten times as long. Servers that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# tests/ is no package (--import-mode=importlib); `from fakes import ...` is how tests reach the fakes.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def lab():
    """A frontend over a fake engine; imported late, so that kernel tests need no web framework."""
    from fakes import frontend

    return frontend.Lab
