"""The CUDA decode experts on threads of a CPU: the kernels' own sources over stand-ins for their instructions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rose.kernels import registry
from rose.kernels.cases import Case, compare
from rose.kernels.moe_experts import cases
from rose.kernels.moe_experts.reference import reference
from rose.kernels.weights import ExpertWeights

registry.load("moe_experts")
from rose.kernels.moe_experts import cuda_decode_calls as calls  # noqa: E402

STAND_INS = Path(__file__).parents[1] / "kernels/decode_host"


def compile_host(folder: Path, source: str) -> ctypes.CDLL:
    """Compile a file of decode_host with the kernels it includes."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    kernels = Path(calls.__file__).parent
    # The stand-ins come last and take the place of what they stand for.
    for path in (
        *kernels.glob("decode_*.cuh"),
        kernels / "e2m1_tables.cuh",
        kernels.parent / "cuda_common/ring.cuh",
        STAND_INS.parent / "cuda_model/permute_ptx.cuh",
        *STAND_INS.iterdir(),
    ):
        (folder / path.name).write_text(path.read_text())
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w"]
    done = subprocess.run(
        [*command, "-o", str(folder / "host.so"), str(folder / source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(folder / "host.so"))


def put_on_cpu(
    experts: calls.DecodeExperts, host: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let `experts` call the host's launchers, on three multiprocessors."""
    types = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}

    def launcher(name, letters):
        function = getattr(host, name)
        function.argtypes = [types[t] for t in letters]

        def call(*arguments):
            assert function(*arguments) == 0

        return call

    class Combine:
        def __getitem__(self, _grid):
            def call(y, ids, weights, out, *, OUT, **_):
                y_TKD = torch.where((ids >= 0).unsqueeze(-1), y.view(*ids.shape, OUT), 0.0)
                out.copy_((y_TKD * weights.float().unsqueeze(-1)).sum(1))

            return call

    monkeypatch.setattr(experts, "call_gate_up", launcher("launch_gate_up", calls.GATE_UP_TYPES))
    monkeypatch.setattr(experts, "call_down", launcher("launch_down", calls.DOWN_TYPES))
    monkeypatch.setattr(calls, "_combine_kernel", Combine)
    monkeypatch.setattr(calls, "num_multiprocessors", lambda _index: 3)
    monkeypatch.setattr(calls, "_stream", lambda _tensor: 0)


def check(
    experts: calls.DecodeExperts,
    case: Case,
    shape: calls.Launch,
    prepare: Callable[[ExpertWeights], Any] = lambda weights: weights,
) -> None:
    """Hold one call against the reference; `prepare`: that of the implementation."""
    arguments = cases.inputs(case, 3, "cpu")
    wanted = {**arguments, "out_TD": arguments["out_TD"].float()}
    reference(**wanted)
    arguments["out_TD"].fill_(float("nan"))
    experts.launch(shape, **{**arguments, "weights": prepare(arguments["weights"])})
    difference = compare("out_TD", arguments["out_TD"], wanted["out_TD"], cases.tolerance(case))
    assert difference is None, difference
