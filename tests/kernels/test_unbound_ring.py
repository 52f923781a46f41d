"""The unbound decode experts by rings on threads of a CPU: the kernel's own source over stand-ins."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rose.kernels.cases import compare
from rose.kernels.moe_experts import cases
from rose.kernels.moe_experts.reference import reference

UNBOUND = Path(__file__).parents[2] / "benchmarks/unbound"
HOST = Path(__file__).parent / "decode_host"
SIZES = {"D": 704, "I": 640, "E": 4, "K": 2}
"""5.5 and 5 groups of 128 columns: the last chunk of two groups may be short, as in 2880 = 22.5 * 128."""

pytestmark = pytest.mark.slow


def _module():
    spec = importlib.util.spec_from_file_location("unbound_ring", UNBOUND / "ring.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


ring = _module()


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("ring_host")
    kernels = Path(ring.narrow.__file__).parent
    for path in (*kernels.glob("decode_*.cuh"), *UNBOUND.glob("ring*.cuh"), *HOST.iterdir()):
        # The stand-ins come last and take the place of what they stand for.
        text = path.read_text().replace("../../src/rose/kernels/moe_experts/", "")
        (folder / path.name).write_text(text)
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w"]
    done = subprocess.run(
        [*command, "-o", str(folder / "host.so"), str(folder / "host_ring.cpp")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(folder / "host.so"))


@pytest.fixture
def on_cpu(host, monkeypatch):
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

    monkeypatch.setattr(ring, "_gate_up", launcher("launch_gate_up_ring", ring.GATE_UP_TYPES))
    monkeypatch.setattr(ring, "_down", launcher("launch_down_ring", ring.DOWN_TYPES))
    monkeypatch.setattr(ring.narrow, "_combine_kernel", Combine)
    monkeypatch.setattr(ring.narrow, "num_multiprocessors", lambda _index: 3)
    monkeypatch.setattr(ring.narrow, "_stream", lambda _tensor: 0)


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (1, {"width": 8, "groups": 2, "stages": 3, "is_fused": True}),
        (17, {"width": 16, "groups": 1, "stages": 2}),
        (30, {"width": 24, "groups": 1, "stages": 3}),
        (18, {"width": 8, "groups": 2, "stages": 3}),
    ],
    ids=["one", "many", "more", "hit_twice"],
)
@pytest.mark.usefixtures("on_cpu")
def test_the_kernel_gives_the_reference(tokens, options):
    case = cases._case("drawn", tokens, SIZES, experts_hit=2 if tokens == 18 else None)
    arguments = cases.inputs(case, 3, "cpu")
    wanted = {**arguments, "out_TD": arguments["out_TD"].float()}
    reference(**wanted)
    arguments["out_TD"].fill_(float("nan"))
    ring.launch(ring.Launch(**options), **arguments)
    difference = compare("out_TD", arguments["out_TD"], wanted["out_TD"], cases.tolerance(case))
    assert difference is None, difference
