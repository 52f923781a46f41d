"""The unbound decode experts that multiply as E4M3: on threads of a CPU, as machine code, as they would be bound."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fakes import decode_experts
from rose.kernels import build, registry
from rose.kernels.aot_code import inspect_cuda
from rose.kernels.moe_experts import cases
from rose.kernels.moe_experts.cuda_decode_calls import Launch
from rose.utils.device import DeviceFacts

UNBOUND = Path(__file__).parents[2] / "benchmarks/unbound"
H200 = DeviceFacts(kind="cuda", name="H200", capability=(9, 0))
SIZES = {"D": 704, "I": 576, "E": 4, "K": 2}
"""22 and 18 blocks of 32 columns: the last chunk of eight has six, or two as in 2880 = 90 * 32."""
NARROW = {"D": 320, "I": 320, "E": 8, "K": 1}
"""Ten blocks, so that many tokens are quickly done."""
EIGHT = Launch(width=8, warps=8, stages=3)
SIXTEEN = Launch(width=16, warps=4, stages=2)

needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")


def _module():
    spec = importlib.util.spec_from_file_location("unbound_e4m3", UNBOUND / "cuda_e4m3_impl.py")
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
    unbound = UNBOUND.glob("decode_e4m3*.cuh")
    return decode_experts.compile_host(folder, "host_e4m3.cpp", unbound)


@pytest.fixture
def on_cpu(host, monkeypatch):
    decode_experts.put_on_cpu(e4m3.EXPERTS, host, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "shape"),
    [
        (1, EIGHT),
        (7, EIGHT),
        (17, SIXTEEN),
        (30, Launch(width=24, warps=4, stages=3)),
        (18, EIGHT),
    ],
    ids=["one", "few", "many", "more", "hit_twice"],
)
@pytest.mark.usefixtures("on_cpu")
def test_the_kernel_gives_the_reference(tokens, shape):
    case = cases._case("drawn", tokens, SIZES, experts_hit=2 if tokens == 18 else None)
    decode_experts.check(e4m3.EXPERTS, case, shape)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129])
@pytest.mark.usefixtures("on_cpu")
def test_any_number_of_tokens_is_taken(tokens):
    decode_experts.check(e4m3.EXPERTS, cases._case("drawn", tokens, NARROW), SIXTEEN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"experts_hit": 3}, {"foreign": True}, {"large_values": True}],
    ids=["most_experts_empty", "foreign_ids", "clamped"],
)
@pytest.mark.usefixtures("on_cpu")
def test_experts_may_be_empty_or_elsewhere_and_values_large(options):
    sizes = {**NARROW, "E": 16, "K": 2}
    decode_experts.check(e4m3.EXPERTS, cases._case("drawn", 10, sizes, **options), SIXTEEN)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_without_any_expert_here_the_sum_is_zero():
    arguments = cases.inputs(cases._case("drawn", 2, NARROW), 3, "cpu")
    arguments["expert_ids_TK"].fill_(-1)
    arguments["out_TD"].fill_(float("nan"))
    e4m3.EXPERTS.launch(SIXTEEN, **arguments)
    assert (arguments["out_TD"] == 0).all()


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_the_ring_goes_round_within_a_tile_and_across_tiles():
    sizes = {"D": 704, "I": 1152, "E": 2, "K": 1}
    decode_experts.check(e4m3.EXPERTS, cases._case("drawn", 1, sizes), EIGHT)


def _down(act_PI):
    """Return what down gives, its exact values, and the sum of the magnitudes of each row's weights."""
    arguments = cases.inputs(cases._case("drawn", len(act_PI), NARROW), 3, "cpu")
    ids_TK, weights = arguments["expert_ids_TK"], arguments["weights"]
    found = torch.full((len(act_PI), NARROW["D"]), float("nan"))
    e4m3.EXPERTS.down(SIXTEEN, act_PI, ids_TK, weights, found)
    down_PDI = weights.down.to_float(torch.float64)[ids_TK[:, 0]]
    exact = torch.einsum("pdi,pi->pd", down_PDI, act_PI.double())
    return found, exact + weights.down_bias_ED[ids_TK[:, 0]].double(), down_PDI.abs().sum(-1)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_activations_within_two_to_the_ninth_of_the_largest_are_exact():
    act_PI = torch.rand(5, NARROW["I"]).add(1 / 64).mul(7).bfloat16()
    found, exact, _ = _down(act_PI * torch.randn_like(act_PI).sign())
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_beside_a_large_number_the_others_are_cut_at_two_to_the_minus_17_of_it():
    act_PI = torch.randn(5, NARROW["I"]).bfloat16()
    act_PI[:, 5] = 3000.0
    found, exact, weight_sums = _down(act_PI)
    error = (found.double() - exact).abs()
    assert (error <= 3000 * 2.0**-17 * weight_sums + 1e-3).all()
    assert error.max() > 1e-2, "nothing was cut: the test asks for nothing"


@pytest.mark.slow
@needs_nvcc
def test_kernels_compile_without_spills_or_late_reads_and_products_are_not_serialised():
    compiled = inspect_cuda("moe_experts", e4m3.LIBRARY)
    assert len(compiled) == 2 * len(e4m3.SHAPES)
    assert [p for c in compiled for p in c.problems({}, {})] == []
    log = e4m3.LIBRARY.build().log
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}
    assert "warning" not in log
    assert "serialized" not in log


@pytest.mark.parametrize("tokens", [e4m3.MIN_TOKENS, 128, 221, 222, e4m3.MAX_TOKENS])
def test_a_shape_that_fits_is_chosen(tokens):
    shape = e4m3.choose(tokens, cases.GPT_OSS_120B)
    assert shape == (e4m3.WIDE if tokens <= 221 else e4m3.NARROW)
    assert e4m3.fits(shape, tokens, cases.GPT_OSS_120B)


@needs_nvcc
def test_bound_as_the_page_says_it_takes_many_experts_from_17_tokens_on(monkeypatch):
    """The steps of README.md: registered, and cuda_decode from 17 to 48 tokens for fewer experts alone."""
    registry.load("moe_experts")
    table = dict(registry._implementations["moe_experts"])
    stream = table["cuda_decode"]
    table["cuda_decode"] = replace(stream, rows=(1, 16))
    table["cuda_decode_few_experts"] = replace(
        stream,
        name="cuda_decode_few_experts",
        rows=(17, 48),
        limits=lambda sizes: "many" if sizes["E"] >= e4m3.MANY_EXPERTS else stream.limits(sizes),
    )
    monkeypatch.setitem(registry._implementations, "moe_experts", table)
    registry.register(e4m3.IMPLEMENTATION)
    few, many = _bound(cases.GPT_OSS_20B), _bound(cases.GPT_OSS_120B)
    assert [few[rows] for rows in (1, 17, 48, 49, 256)] == [
        stream.function, stream.function, stream.function, few[49], few[49]
    ]  # fmt: skip
    assert few[49] == table["cuda_ring"].function
    assert [many[rows] for rows in (1, 16, 17, 48, 49, 256)] == [
        stream.function, stream.function, *[e4m3.moe_experts] * 4
    ]  # fmt: skip
    assert many[257] == stream.function


def _bound(sizes):
    bound = registry.bind(
        "moe_experts", formats={"activation": "bf16", "weight": "mxfp4"}, sizes=sizes, device=H200
    )
    decode = [(r, i.function) for r, i in bound.table.items() if r.phase == "decode"]
    return {
        rows: next(f for r, f in decode if r.min_rows <= rows <= r.max_rows)
        for rows in (1, 16, 17, 48, 49, 256, 257)
    }
