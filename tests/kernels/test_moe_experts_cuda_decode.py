"""The CUDA decode experts on threads of a CPU."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace

import pytest

from fakes import decode_experts
from rose.kernels import build
from rose.kernels.moe_experts import cases
from rose.kernels.moe_experts.cuda_decode_calls import Launch

impl = importlib.import_module("rose.kernels.moe_experts.cuda_decode_impl")
SIZES = {"D": 96, "I": 160, "E": 5, "K": 2}
"""3 and 5 blocks of 32 columns: the last share of a warp is short, as in 2880 = 22.5 * 128."""

needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return decode_experts.compile_host(tmp_path_factory.mktemp("decode_host"), "host.cpp")


@pytest.fixture
def on_cpu(host, monkeypatch):
    decode_experts.put_on_cpu(impl.EXPERTS, host, monkeypatch)


def _check(case, shape) -> None:
    decode_experts.check(impl.EXPERTS, case, shape)


@pytest.mark.parametrize("weight", ["mxfp4", "fp8_block"])
@pytest.mark.parametrize(
    ("tokens", "shape"),
    [
        (1, Launch(stages=2)),
        (7, Launch(stages=3)),
        (17, Launch(stages=3)),
        (22, Launch(width=16, stages=2)),
    ],
    ids=["one", "few", "listed_by_all_threads", "sixteen_tokens_a_pass"],
)
@pytest.mark.usefixtures("on_cpu")
def test_the_kernel_gives_the_reference(weight, tokens, shape):
    _check(cases.make_case("drawn", tokens, SIZES, weight=weight), shape)


@pytest.mark.usefixtures("on_cpu")
def test_a_warp_goes_round_where_rows_are_long():
    _check(cases.make_case("drawn", 1, {"D": 32, "I": 1120, "E": 2, "K": 1}), Launch(stages=2))


@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (12, 16)])
@pytest.mark.usefixtures("on_cpu")
def test_rows_of_a_length_known_to_the_compiler(tokens, width):
    sizes = {"D": 1184, "I": 64, "E": 1, "K": 1}
    _check(cases.make_case("drawn", tokens, sizes), Launch(stages=2, width=width))


@pytest.mark.usefixtures("on_cpu")
def test_an_expert_with_more_tokens_than_a_pass_takes_is_hit_twice():
    _check(cases.make_case("drawn", 18, SIZES, experts_hit=2), Launch(stages=2))


@pytest.mark.usefixtures("on_cpu")
def test_experts_that_live_elsewhere_add_nothing():
    _check(cases.make_case("drawn", 9, SIZES, foreign=True), Launch(stages=2))


@pytest.mark.usefixtures("on_cpu")
def test_without_any_expert_here_the_sum_is_zero():
    arguments = cases.inputs(cases.make_case("drawn", 2, SIZES), 3, "cpu")
    arguments["expert_ids_TK"].fill_(-1)
    arguments["out_TD"].fill_(float("nan"))
    impl.EXPERTS.launch(Launch(), **arguments)
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
    assert len(registers) == 16
    assert max(registers) * 288 * 2 <= 65536
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}
    assert "warning" not in log
