"""A process in which Triton interprets its kernels on CPU tensors: that is decided when triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def interpret(script: str, *arguments: str) -> str:
    """Run a script there and return what it printed; a script that fails fails the test with its last words."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with tempfile.TemporaryDirectory() as folder:
        # Triton reads the source of kernels, so they have to come from a file.
        path = Path(folder) / "script.py"
        path.write_text(script)
        done = subprocess.run(
            [sys.executable, str(path), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
