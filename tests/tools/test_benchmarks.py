"""Scripts of benchmarks/ where a package that they need is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "late_kernels.py"


def test_the_late_kernels_of_a_machine_without_triton_are_told_what_to_install():
    code = "import runpy, sys; sys.modules['triton'] = None; sys.argv = [sys.argv[1], '--help']; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: benchmarks/late_kernels.py needs triton, which is not installed")
    assert line.endswith("pip install 'rose-engine[engine,triton]'")
