"""decode_begin: every implementation against the reference, the Triton one in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rose.kernels import registry
from rose.kernels.check import check_case
from rose.kernels.decode_begin.cases import CASES
from rose.utils.device import CPU

SMALL = [c for c in CASES if not c.large]


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_torch_moves_what_the_reference_moves(case):
    operation = registry.load("decode_begin")
    [torch_] = [i for i in registry.implementations("decode_begin") if i.name == "torch"]
    outcome = check_case(operation, torch_, case, CPU, seed=1)
    assert outcome.status == "ok", outcome.detail


def test_triton_moves_what_the_reference_moves():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "rose.kernels", "check", "decode_begin", "--interpret"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"{len(SMALL)} ok, 0 failed" in found.stdout, found.stdout
