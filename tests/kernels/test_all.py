"""Every implementation of every operation over every case: on the CPU, in Triton's interpreter, on a GPU.

A new implementation or case is tested here without a further line. The interpreter runs in a process of its own,
because triton decides at import which world it is in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rose.kernels import registry
from rose.kernels.cases import Case
from rose.kernels.check import cases_module, check_all, check_case
from rose.utils.device import CPU, detect

SOURCE = Path(__file__).parents[2] / "src"
OPERATIONS = registry.operation_names()


def implementations(*, toolchain: str | None = None) -> list[Any]:
    """(operation, implementation) as test parameters, references left out."""
    return [
        pytest.param(name, i, id=f"{name}-{i.name}")
        for name in OPERATIONS
        for i in registry.implementations(name)
        if i.name != "reference" and toolchain in (None, i.toolchain)
    ]


def small_cases() -> list[Any]:
    """(operation, implementation, case) of all that runs on a CPU."""
    return [
        pytest.param(name, i, case, id=f"{name}-{i.name}-{case.name}")
        for name in OPERATIONS
        for i in registry.implementations(name)
        if i.name != "reference" and i.device != "cuda"
        for case in cases_module(name).CASES
        if not case.large
        and all(case.formats.get(o) in accepted for o, accepted in i.formats.items())
    ]


@pytest.mark.parametrize(("name", "implementation", "case"), small_cases())
def test_on_the_cpu(name: str, implementation: registry.Implementation, case: Case):
    outcome = check_case(registry.load(name), implementation, case, CPU, seed=0)
    assert outcome.status == "ok", outcome.detail


def interpret(folder: Path, *options: str) -> list[dict[str, Any]]:
    """Run the interpreted check; return its outcomes."""
    file = folder / "outcomes.jsonl"
    command = [sys.executable, "-m", "rose.kernels", "check", "--interpret", "--json", str(file)]
    result = subprocess.run(
        [*command, *options],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in result.stderr, result.stderr
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory) -> list[dict[str, Any]]:
    """Outcomes of the first and the last case of each Triton kernel; `make soak` takes more."""
    pytest.importorskip("triton")
    return interpret(tmp_path_factory.mktemp("interpreted"), "--few", "2")


@pytest.mark.parametrize(("name", "implementation"), implementations(toolchain="triton"))
def test_in_the_interpreter(name: str, implementation: registry.Implementation, interpreted):
    if not implementation.interpreted:
        pytest.skip("the interpreter is not right for what this kernel does")
    found = [
        o
        for o in interpreted
        if (o["operation"], o["implementation"]) == (name, implementation.name)
    ]
    assert found, f"no case of {name} suits {implementation.name}: add one in its activation dtype"
    assert [o for o in found if o["status"] != "ok"] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_cases_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    outcomes = interpret(tmp_path, "--few", "12")
    assert [o for o in outcomes if o["status"] == "failed"] == []
    assert sum(o["status"] == "ok" for o in outcomes) > 0


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "implementation"), implementations())
def test_on_a_gpu(name: str, implementation: registry.Implementation):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    outcomes = list(check_all(detect("cuda"), operations=[name], only=implementation.name))
    assert [str(o) for o in outcomes if o.status == "failed"] == []


@pytest.mark.parametrize("name", OPERATIONS)
def test_cases_are_named_once_fit_their_contract_and_count_their_work(name: str):
    operation, module = registry.load(name), cases_module(name)
    names = [case.name for case in module.CASES]
    assert len(set(names)) == len(names)
    for case in module.CASES:
        assert set(operation.sizes) <= set(case.sizes), case.name
        assert set(operation.formats) <= set(case.formats), case.name
        assert operation.validate(case.formats, case.sizes) == [], case.name
        assert module.tolerance(case).reason
        assert module.num_bytes(case) > 0
        assert module.flops(case) >= 0
        if not case.large:
            arguments = module.inputs(case, 0, "cpu")
            assert registry.call_problems(operation, arguments) == [], case.name


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_a_reference_and_a_portable_implementation(name: str):
    bands = {i.band for i in registry.implementations(name) if i.device == "any"}
    assert {registry.Band.REFERENCE, registry.Band.PORTABLE} <= bands


@pytest.mark.parametrize("name", OPERATIONS)
def test_inputs_depend_on_nothing_but_the_seed(name: str):
    module = cases_module(name)
    case = next(c for c in module.CASES if not c.large)
    first, same, other = (module.inputs(case, seed, "cpu") for seed in (5, 5, 6))
    operation, is_different = registry.load(name), False
    for key, value in first.items():
        if isinstance(value, torch.Tensor) and key not in operation.outputs:
            assert torch.equal(value, same[key]), key
            is_different |= not torch.equal(value, other[key])
    assert is_different
