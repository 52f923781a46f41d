"""The decode experts by warpgroups on threads of a CPU: the kernel's own source over stand-ins for its instructions."""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from rose.kernels import build, registry
from rose.kernels.cases import compare
from rose.kernels.moe_experts import cases
from rose.kernels.moe_experts.reference import reference

registry.load("moe_experts")
cuda_warpgroup = importlib.import_module("rose.kernels.moe_experts.cuda_warpgroup_impl")
HOST = Path(__file__).parent / "decode_host"
SIZES = {"D": 704, "I": 640, "E": 4, "K": 2}
"""5.5 and 5 groups of 128 columns: the last one may be short, as in 2880 = 22.5 * 128."""


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """The launchers over a CPU, under the names that the implementation calls."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("decode_host")
    for path in (*cuda_warpgroup.LIBRARY.source.parent.glob("decode_*.cuh"), *HOST.iterdir()):
        shutil.copy(
            path, folder
        )  # the stand-ins come last and take the place of what they stand for
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w"]
    done = subprocess.run(
        [*command, "-o", str(folder / "host.so"), str(folder / "host_warpgroup.cpp")],
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

    ours, narrow = cuda_warpgroup, cuda_warpgroup.narrow
    monkeypatch.setattr(ours, "_gate_up", launcher("launch_gate_up_wide", ours.GATE_UP_TYPES))
    monkeypatch.setattr(ours, "_down", launcher("launch_down_wide", ours.DOWN_TYPES))
    monkeypatch.setattr(narrow, "_combine_kernel", Combine)
    monkeypatch.setattr(narrow, "num_multiprocessors", lambda _index: 3)
    monkeypatch.setattr(narrow, "_stream", lambda _tensor: 0)


def _check(case, **options) -> None:
    arguments = cases.inputs(case, 3, "cpu")
    wanted = {**arguments, "out_TD": arguments["out_TD"].float()}
    reference(**wanted)
    arguments["out_TD"].fill_(float("nan"))
    cuda_warpgroup.launch(cuda_warpgroup.Launch(**options), **arguments)
    difference = compare("out_TD", arguments["out_TD"], wanted["out_TD"], cases.tolerance(case))
    assert difference is None, difference


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (1, {"width": 8, "groups": 2, "is_fused": True, "fetches": True}),
        (7, {"width": 8, "groups": 2, "is_fused": True}),
        (17, {"width": 16, "groups": 1}),
        (30, {"width": 24, "groups": 1}),
    ],
    ids=["one", "few", "listed_by_all_threads", "twenty_four_tokens_a_pass"],
)
@pytest.mark.usefixtures("on_cpu")
def test_the_kernel_gives_the_reference(tokens, options):
    _check(cases._case("drawn", tokens, SIZES), **options)


@pytest.mark.usefixtures("on_cpu")
def test_codes_are_loaded_ahead_round_and_round():
    _check(
        cases._case("drawn", 1, {"D": 704, "I": 1120, "E": 2, "K": 1}),
        width=8, groups=2, is_fused=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_an_expert_with_more_tokens_than_a_pass_takes_is_hit_twice():
    _check(cases._case("drawn", 18, SIZES, experts_hit=2), width=8, groups=2)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("on_cpu")
def test_experts_that_live_elsewhere_add_nothing(fused):
    _check(cases._case("drawn", 9, SIZES, foreign=True), width=8, groups=2, is_fused=fused)


@pytest.mark.usefixtures("on_cpu")
def test_without_any_expert_here_the_sum_is_zero():
    arguments = cases.inputs(cases._case("drawn", 2, SIZES), 3, "cpu")
    arguments["expert_ids_TK"].fill_(-1)
    arguments["out_TD"].fill_(float("nan"))
    cuda_warpgroup.launch(cuda_warpgroup.Launch(groups=2, is_fused=True), **arguments)
    assert (arguments["out_TD"] == 0).all()


@pytest.mark.parametrize("tokens", [65, 128, 512])
def test_the_chosen_shape_fits_a_multiprocessor(tokens):
    shape = cuda_warpgroup.choose(tokens, cases.GPT_OSS_20B)
    assert cuda_warpgroup.shared_bytes(shape, tokens, cases.GPT_OSS_20B) <= 227 * 1024


@pytest.mark.slow
@pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")
def test_kernels_compile_without_spills_and_products_are_not_serialised():
    log = cuda_warpgroup.LIBRARY.build().log
    registers = [int(r) for r in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == 2
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}
    assert "warning" not in log
    assert "serialized" not in log
