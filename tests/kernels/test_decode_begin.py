"""decode_begin in Triton moves what the reference moves: all small cases, since none of it is arithmetic."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rose.kernels.decode_begin.cases import CASES

SMALL = [c for c in CASES if not c.large]


def test_triton_moves_what_the_reference_moves():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "rose.kernels", "check", "decode_begin", "--interpret"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{len(SMALL)} ok, 0 failed" in found.stdout, found.stdout
