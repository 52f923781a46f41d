"""The unbound decode experts that multiply as E4M3, on threads of a CPU."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from fakes import decode_experts
from rose.kernels import build
from rose.kernels.aot_code import inspect_cuda
from rose.kernels.moe_experts import cases
from rose.kernels.moe_experts.cuda_decode_calls import Launch

UNBOUND = Path(__file__).parents[2] / "benchmarks/unbound"
SIZES = {"D": 704, "I": 576, "E": 4, "K": 2}
"""22 and 18 blocks of 32 columns: the last chunk of eight has six, or two as in 2880 = 90 * 32."""
EIGHT = Launch(width=8, warps=8, stages=3)

pytestmark = pytest.mark.slow


def _module():
    spec = importlib.util.spec_from_file_location("unbound_e4m3", UNBOUND / "e4m3.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


e4m3 = _module()


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("e4m3_host")
    return decode_experts.compile_host(folder, "host_e4m3.cpp", UNBOUND.glob("e4m3*.cuh"))


@pytest.fixture
def on_cpu(host, monkeypatch):
    decode_experts.put_on_cpu(e4m3.EXPERTS, host, monkeypatch)


@pytest.mark.parametrize(
    ("tokens", "shape"),
    [
        (1, EIGHT),
        (7, EIGHT),
        (17, Launch(width=16, warps=4, stages=2)),
        (30, Launch(width=24, warps=4, stages=3)),
        (18, EIGHT),
    ],
    ids=["one", "few", "many", "more", "hit_twice"],
)
@pytest.mark.usefixtures("on_cpu")
def test_the_kernel_gives_the_reference(tokens, shape):
    case = cases._case("drawn", tokens, SIZES, experts_hit=2 if tokens == 18 else None)
    decode_experts.check(e4m3.EXPERTS, case, shape)


@pytest.mark.usefixtures("on_cpu")
def test_the_ring_goes_round_within_a_tile_and_across_tiles():
    sizes = {"D": 704, "I": 1152, "E": 2, "K": 1}
    decode_experts.check(e4m3.EXPERTS, cases._case("drawn", 1, sizes), EIGHT)


@pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")
def test_kernels_compile_without_spills_or_late_reads_and_products_are_not_serialised():
    compiled = inspect_cuda("moe_experts", e4m3.LIBRARY)
    assert [p for c in compiled for p in c.problems({}, {})] == []
    log = e4m3.LIBRARY.build().log
    assert log.count("Compiling entry function") == 2 * len(e4m3.SHAPES)
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}
    assert "warning" not in log
    assert "serialized" not in log
