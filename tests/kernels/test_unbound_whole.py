"""The unbound decode experts in one launch on a CPU; blocks are processes, since they wait for each other."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from fakes import decode_experts
from rose.kernels import build
from rose.kernels.moe_experts import cases
from rose.kernels.moe_experts.cuda_decode_calls import Launch

UNBOUND = Path(__file__).parents[2] / "benchmarks/unbound"


def _module():
    spec = importlib.util.spec_from_file_location("unbound_whole", UNBOUND / "whole.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


whole = _module()


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole_host")
    return decode_experts.compile_host(folder, "host_whole.cpp", UNBOUND.glob("whole*.cuh"))


@pytest.fixture
def experts(host, monkeypatch):
    types = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}
    experts = whole.WholeExperts(whole.LIBRARY)
    for name, letters in (("launch_whole", whole.WHOLE_TYPES), ("launch_sum", whole.SUM_TYPES)):
        function = getattr(host, name)
        function.argtypes = [types[t] for t in letters]

        def call(*arguments, function=function):
            assert function(*arguments) == 0

        monkeypatch.setattr(experts, name.replace("launch", "call"), call)
    monkeypatch.setattr(whole, "num_multiprocessors", lambda _index: 3)
    monkeypatch.setattr(whole, "_stream", lambda _tensor: 0)
    return experts


@pytest.mark.parametrize(
    ("tokens", "columns", "shape"),
    [
        (1, 96, Launch(stages=2)),
        (1, 160, Launch(stages=4, blocks_per_sm=2)),
        (9, 96, Launch(stages=3)),
        (22, 96, Launch(width=16, stages=2)),
        (18, 64, Launch(stages=2)),
    ],
    ids=["one", "more_blocks", "few", "sixteen_tokens_a_pass", "hit_twice"],
)
def test_the_kernel_gives_the_reference(experts, tokens, columns, shape):
    sizes = {"D": columns, "I": columns, "E": 5, "K": 2}
    case = cases._case("drawn", tokens, sizes, experts_hit=2 if tokens == 18 else None)
    decode_experts.check(experts, case, shape)
    # What a call leaves in the counters must do for the next.
    assert all((counters == 0).all() for counters in experts._written.values())


def test_experts_that_live_elsewhere_add_nothing(experts):
    sizes = {"D": 96, "I": 96, "E": 5, "K": 2}
    decode_experts.check(experts, cases._case("drawn", 9, sizes, foreign=True), Launch(stages=2))


def test_without_any_expert_here_the_sum_is_zero(experts):
    arguments = cases.inputs(cases._case("drawn", 2, {"D": 96, "I": 96, "E": 5, "K": 2}), 3, "cpu")
    arguments["expert_ids_TK"].fill_(-1)
    arguments["out_TD"].fill_(float("nan"))
    experts.launch(Launch(), **arguments)
    assert (arguments["out_TD"] == 0).all()


@pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")
def test_kernels_compile_without_spills_and_two_blocks_fit():
    log = whole.LIBRARY.build().log
    registers = [int(r) for r in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == 3
    assert max(registers) * 288 * 2 <= 65536
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}
    assert "warning" not in log
