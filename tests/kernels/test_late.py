"""A kernel that is compiled once serving has begun is counted and named, whoever launches it.

In a process of its own: triton.jit decides at import whether it compiles or interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SOURCE = Path(__file__).parents[2] / "src"
CHILD = """
import sys
from pathlib import Path
from rose.kernels import aot, registry
from rose.kernels.check import cases_module
from rose.kernels.late import LateKernels
from rose.utils.log import configure_logging

configure_logging()
name = "quantize_activation"
implementation = next(i for i in registry.implementations(name) if i.name == "triton")
cases = [case for case in cases_module(name).CASES if case.timed]
first = cases[0]
other = next(case for case in cases if case.sizes["group"] != first.sizes["group"])
late = LateKernels()

def count(case):
    aot.launches(implementation, case, cache=Path(sys.argv[1]))
    return late.num

before = count(first)
late.watch()
print(before, count(first), count(other), count(other))
"""


def test_a_kernel_compiled_late_is_counted_once_and_named(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(SOURCE)},
        check=False,
    )
    assert done.stdout == "0 0 1 1\n", done.stderr
    [line] = [text for text in done.stderr.splitlines() if "while serving" in text]
    assert "rose.kernels.quantize_activation.triton_impl._kernel" in line
