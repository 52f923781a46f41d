"""Scripts of benchmarks/: what they take of other modules is public there, and what is not installed is told."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "late_kernels.py"


def test_the_late_kernels_of_a_machine_without_triton_are_told_what_to_install():
    code = "import runpy, sys; sys.modules['triton'] = None; sys.argv = [sys.argv[1], '--help']; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: benchmarks/late_kernels.py needs triton, which is not installed")
    assert line.endswith("pip install 'rose-engine[engine,triton]'")


def _private(path: Path) -> Iterator[str]:
    """Yield the names that begin with an underscore and are another module's or another object's."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names, owner = [alias.name for alias in node.names], ""
        elif isinstance(node, ast.Attribute):
            names, owner = [node.attr], ast.unparse(node.value)
        else:
            continue
        if owner not in ("self", "cls"):
            yield from (n for n in names if n.startswith("_") and not n.startswith("__"))


def test_scripts_use_public_names_of_others():
    found = {(p.name, n) for p in BENCHMARKS.glob("*.py") for n in _private(p)}
    assert not found


def test_a_private_name_would_be_found(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from a import _b, __version__, c\nc._d(c.e._f)\nself._g = __file__\n")
    assert set(_private(script)) == {"_b", "_d", "_f"}
