"""Fixtures that several folders of tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# tests/ is no package (--import-mode=importlib); `from fakes import ...` is how tests reach the fakes.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def lab():
    """A frontend over a fake engine; imported late, so that kernel tests need no web framework."""
    from fakes import frontend

    return frontend.Lab
