"""Kernels compile for Hopper on a machine without a GPU, and their code is what their sources promise.

In processes of their own: triton.jit decides at import whether it compiles or interprets, and other tests
want the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rose.kernels import aot, build
from rose.kernels.aot_code import MAX_SHARED_BYTES, Compiled
from rose.utils.errors import RoseError

SOURCE = Path(__file__).parents[2] / "src"
pytest.importorskip("triton")
needs_tools = pytest.mark.skipif(
    build.find_cuobjdump() is None, reason="cuobjdump is not installed"
)
needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")

GOOD = Compiled(
    operation="gemm",
    implementation="triton",
    case="qkv_1",
    kernel="gemm_kernel",
    registers=128,
    spill_bytes=0,
    shared_bytes=MAX_SHARED_BYTES,
    has_product=True,
    matrix_instructions=["HGMMA"],
)


def _aot(*arguments: str) -> subprocess.CompletedProcess:
    return _child("-m", "rose.kernels", "aot", *arguments)


def _child(*arguments: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(SOURCE)},
        check=False,
    )


@needs_tools
def test_a_kernel_compiles_once_and_is_then_found(tmp_path):
    first = _aot("quantize_activation", "--cache", str(tmp_path))
    assert first.returncode == 0, first.stdout + first.stderr
    assert "compiling for sm_90a" in first.stdout
    (results,) = tmp_path.glob("quantize_activation-*.json")
    kernels = [Compiled(**entry) for entry in json.loads(results.read_text())]
    # Two widths of scale groups are in the cases, so that two kernels ship.
    assert len(kernels) == 2
    assert all(k.registers > 0 and not k.has_product for k in kernels)
    begin = time.perf_counter()
    again = _aot("quantize_activation", "--cache", str(tmp_path))
    assert "compiling" not in again.stdout
    assert again.stdout.splitlines() == first.stdout.splitlines()[1:]
    assert (
        time.perf_counter() - begin < 60
    )  # an import of torch; compiling takes about as long again


ONE_CASE = """
import sys
from pathlib import Path
from rose.kernels import aot, registry
from rose.kernels.aot_code import inspect_triton
from rose.kernels.check import cases_module
implementation = next(i for i in registry.implementations("moe_route") if i.name == "triton")
case = next(c for c in cases_module("moe_route").CASES if c.name == "20b_8192")
folder = Path(sys.argv[1])
for kernel in aot.launches(implementation, case, cache=folder):
    c = inspect_triton(kernel, operation="moe_route", implementation="triton", case=case.name, folder=folder)
    print(c.has_product, *c.matrix_instructions)
"""


@needs_tools
def test_matrix_products_are_seen_in_source_and_code(tmp_path):
    done = _child("-c", ONE_CASE, str(tmp_path))
    assert done.stdout == "True HGMMA\n", done.stderr


@needs_tools
@needs_nvcc
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_shipped_kernel_keeps_its_promises():
    done = _aot()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "0 problems"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"matrix_instructions": []}, "without a tensor-core instruction"),
        ({"shared_bytes": MAX_SHARED_BYTES + 1}, "of shared memory"),
        ({"spill_bytes": 12}, "spills 12 bytes, 8 are stated"),
        ({"late_reads": ["a", "b"]}, "before 2 reads have arrived, 1 are stated (a)"),
    ],
)
def test_broken_promises_are_named(change, word):
    spills = {"gemm": (8, "reason"), "other": (100, "reason")}
    late = {"gemm": (1, "reason"), "other": (100, "reason")}
    assert GOOD.problems({}, {}) == []
    assert replace(GOOD, spill_bytes=8, late_reads=["a"]).problems(spills, late) == []
    (problem,) = replace(GOOD, **change).problems(spills, late)
    assert word in problem
    assert problem.startswith("gemm/triton gemm_kernel qkv_1")


def test_every_cuda_implementation_has_its_library_found():
    from rose.kernels import registry

    for name in registry.operation_names():
        toolchains = {i.toolchain for i in registry.implementations(name)}
        assert bool(aot.cuda_libraries(name)) == ("cuda" in toolchains), name


def test_a_source_that_no_module_names_is_a_problem(monkeypatch, tmp_path):
    (tmp_path / "left_over.cu").write_text("")
    (tmp_path / "kernel_sm90.cu").write_text("")
    (tmp_path / "cuda_impl.py").write_text("SOURCE = 'kernel_sm90.cu'")
    monkeypatch.setattr(aot, "_folder", lambda _name: tmp_path)
    (problem,) = aot.problems("gemm", [GOOD])
    assert "left_over.cu of gemm is named by no module" in problem


def test_missing_tools_are_named_together(monkeypatch, tmp_path):
    monkeypatch.setattr(aot, "find_cuobjdump", lambda: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RoseError, match=r"without TRITON_INTERPRET .*; cuobjdump"):
        aot.compile_operation("gemm", cache=tmp_path)


def test_results_follow_the_sources(monkeypatch, tmp_path):
    root = tmp_path / "kernels"
    (root / "gemm").mkdir(parents=True)
    source, frame = root / "gemm" / "triton_impl.py", root / "registry.py"
    source.write_text("one")
    frame.write_text("one")
    monkeypatch.setattr(aot, "ROOT", root)
    keys = {aot._key("gemm")}
    source.write_text("two")
    keys.add(aot._key("gemm"))
    frame.write_text("two")
    keys.add(aot._key("gemm"))
    assert len(keys) == 3
    assert aot._key("gemm") in keys
