"""The decode experts by rings on threads of a CPU."""

from __future__ import annotations

import importlib
import re

import pytest

from fakes import decode_experts
from rose.kernels import build, registry
from rose.kernels.aot_code import inspect_cuda
from rose.kernels.moe_experts import cases
from rose.kernels.moe_experts.cuda_decode_calls import Launch
from rose.utils.device import DeviceFacts

impl = importlib.import_module("rose.kernels.moe_experts.cuda_ring_impl")
H200 = DeviceFacts(kind="cuda", name="H200", capability=(9, 0))
SIZES = {"D": 704, "I": 640, "E": 4, "K": 2}
"""5.5 and 5 groups of 128 columns: the last chunk of two groups may be short, as in 2880 = 22.5 * 128."""
EIGHT = Launch(width=8, warps=8, stages=3)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return decode_experts.compile_host(tmp_path_factory.mktemp("ring_host"), "host_ring.cpp")


@pytest.fixture
def on_cpu(host, monkeypatch):
    decode_experts.put_on_cpu(impl.EXPERTS, host, monkeypatch)


def _check(case, shape) -> None:
    decode_experts.check(impl.EXPERTS, case, shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "shape"),
    [
        (7, EIGHT),
        (17, Launch(width=16, warps=4, stages=2)),
        (30, Launch(width=24, warps=4, stages=3)),
    ],
    ids=["few", "listed_by_all_threads", "twenty_four_tokens_a_pass"],
)
@pytest.mark.usefixtures("on_cpu")
def test_the_kernel_gives_the_reference(tokens, shape):
    _check(cases._case("drawn", tokens, SIZES), shape)


@pytest.mark.usefixtures("on_cpu")
def test_the_ring_goes_round_within_a_tile_and_across_tiles():
    _check(cases._case("drawn", 1, {"D": 704, "I": 1120, "E": 2, "K": 1}), EIGHT)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_an_expert_with_more_tokens_than_a_pass_takes_is_hit_twice():
    _check(cases._case("drawn", 18, SIZES, experts_hit=2), EIGHT)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_experts_that_live_elsewhere_add_nothing():
    _check(cases._case("drawn", 9, SIZES, foreign=True), EIGHT)


@pytest.mark.usefixtures("on_cpu")
def test_without_any_expert_here_the_sum_is_zero():
    arguments = cases.inputs(cases._case("drawn", 2, SIZES), 3, "cpu")
    arguments["expert_ids_TK"].fill_(-1)
    arguments["out_TD"].fill_(float("nan"))
    impl.EXPERTS.launch(EIGHT, **arguments)
    assert (arguments["out_TD"] == 0).all()


@pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")
@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [(cases.GPT_OSS_20B, "cuda_ring"), (cases.GPT_OSS_120B, "cuda_decode_many_tokens")],
)
def test_the_ring_is_bound_for_few_experts_and_many_tokens(sizes, wanted):
    bound = registry.bind(
        "moe_experts", formats={"activation": "bf16", "weight": "mxfp4"}, sizes=sizes, device=H200
    )
    names = {rows: bound.table[_regime(bound, rows)].name for rows in (32, 48, 64, 128, 256)}
    assert names == {32: "cuda_decode", 48: "cuda_decode", 64: wanted, 128: wanted, 256: wanted}


def _regime(bound, rows):
    return next(r for r in bound.table if r.phase == "decode" and r.min_rows <= rows <= r.max_rows)


@pytest.mark.parametrize("tokens", [impl.MIN_TOKENS, 128, impl.MAX_TOKENS])
def test_the_chosen_shape_fits_a_multiprocessor(tokens):
    assert impl.fits(impl.CHOSEN, tokens, cases.GPT_OSS_20B)


@pytest.mark.slow
@pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")
def test_kernels_compile_without_spills_or_late_reads_and_products_are_not_serialised():
    compiled = inspect_cuda("moe_experts", impl.LIBRARY)
    assert [p for c in compiled for p in c.problems({}, {})] == []
    log = impl.LIBRARY.build().log
    registers = [int(r) for r in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == 2
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}
    assert "warning" not in log
    assert "serialized" not in log
