"""The CUDA decode experts on threads of a CPU: the kernel's own source over stand-ins for its instructions."""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rose.kernels import build, registry
from rose.kernels.cases import compare
from rose.kernels.moe_experts import cases
from rose.kernels.moe_experts.reference import reference

registry.load("moe_experts")
impl = importlib.import_module("rose.kernels.moe_experts.cuda_decode_impl")
HOST = Path(__file__).parent / "decode_host"
SIZES = {"D": 96, "I": 160, "E": 5, "K": 2}
"""3 and 5 blocks of 32 columns: the last share of a warp is short, as in 2880 = 22.5 * 128."""

needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """The launchers over a CPU, under the names that the implementation calls."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("decode_host")
    for path in (*HOST.iterdir(), *impl.LIBRARY.source.parent.glob("decode_*.cuh")):
        if path.name != "decode_ptx.cuh" or path.parent == HOST:
            shutil.copy(path, folder)
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w"]
    done = subprocess.run(
        [*command, "-o", str(folder / "host.so"), str(folder / "host.cpp")],
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

    monkeypatch.setattr(impl, "_gate_up", launcher("launch_gate_up", impl.GATE_UP_TYPES))
    monkeypatch.setattr(impl, "_down", launcher("launch_down", impl.DOWN_TYPES))
    monkeypatch.setattr(impl, "_combine_kernel", Combine)
    monkeypatch.setattr(impl, "num_multiprocessors", lambda _index: 3)
    monkeypatch.setattr(impl, "_stream", lambda _tensor: 0)


def _check(case, shape) -> None:
    arguments = cases.inputs(case, 3, "cpu")
    wanted = {**arguments, "out_TD": arguments["out_TD"].float()}
    reference(**wanted)
    arguments["out_TD"].fill_(float("nan"))
    impl.launch(shape, **arguments)
    difference = compare("out_TD", arguments["out_TD"], wanted["out_TD"], cases.tolerance(case))
    assert difference is None, difference


@pytest.mark.parametrize("weight", ["mxfp4", "fp8_block"])
@pytest.mark.parametrize(
    ("tokens", "shape"),
    [
        (1, impl.Launch(is_fused=True, stages=2)),
        (7, impl.Launch(is_fused=True, stages=3)),
        (17, impl.Launch(stages=3)),
        (22, impl.Launch(tiles=2, stages=2)),
    ],
    ids=["one", "few", "listed_by_all_threads", "sixteen_tokens_a_pass"],
)
@pytest.mark.usefixtures("on_cpu")
def test_the_kernel_gives_the_reference(weight, tokens, shape):
    _check(cases._case("drawn", tokens, SIZES, weight=weight), shape)


@pytest.mark.usefixtures("on_cpu")
def test_a_warp_goes_round_where_rows_are_long():
    _check(cases._case("drawn", 1, {"D": 32, "I": 1120, "E": 2, "K": 1}), impl.Launch(stages=2))


@pytest.mark.usefixtures("on_cpu")
def test_an_expert_with_more_tokens_than_a_pass_takes_is_hit_twice():
    _check(cases._case("drawn", 18, SIZES, experts_hit=2), impl.Launch(stages=2))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("on_cpu")
def test_experts_that_live_elsewhere_add_nothing(fused):
    _check(cases._case("drawn", 9, SIZES, foreign=True), impl.Launch(is_fused=fused, stages=2))


@pytest.mark.usefixtures("on_cpu")
def test_without_any_expert_here_the_sum_is_zero():
    arguments = cases.inputs(cases._case("drawn", 2, SIZES), 3, "cpu")
    arguments["expert_ids_TK"].fill_(-1)
    arguments["out_TD"].fill_(float("nan"))
    impl.launch(impl.Launch(is_fused=True), **arguments)
    assert (arguments["out_TD"] == 0).all()


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 32, 128, 512])
def test_chosen_shapes_fit_a_multiprocessor(tokens, is_fp8):
    for sizes in (cases.GPT_OSS_20B, cases.GPT_OSS_120B, cases.SMALL):
        shape = impl.choose(tokens, sizes, is_fp8=is_fp8)
        used = impl.shared_bytes(shape, tokens, sizes, is_fp8=is_fp8)
        assert (used + 1024) * shape.blocks_per_sm <= 228 * 1024
        more = replace(shape, stages=shape.stages + 1)
        assert impl.shared_bytes(more, tokens, sizes, is_fp8=is_fp8) > used


@needs_nvcc
def test_kernels_compile_without_spills_and_two_blocks_fit():
    log = impl.LIBRARY.build().log
    registers = [int(r) for r in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == 12
    assert max(registers) * 288 * 2 <= 65536
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}
    assert "warning" not in log
