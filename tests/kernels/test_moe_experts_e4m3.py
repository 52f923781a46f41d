"""The decode experts that multiply as E4M3: on threads of a CPU, as machine code, as they are bound."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

from fakes import decode_experts
from rose.kernels import build, registry
from rose.kernels.aot_code import inspect_cuda
from rose.kernels.moe_experts import cases, e4m3_stages
from rose.kernels.moe_experts.cuda_decode_calls import Launch
from rose.kernels.moe_experts.e4m3_weights import TILE_ROWS, tile_exponents, with_exponents
from rose.kernels.moe_experts.reference import swiglu
from rose.utils.device import DeviceFacts

e4m3 = importlib.import_module("rose.kernels.moe_experts.cuda_e4m3_impl")
H200 = DeviceFacts(kind="cuda", name="H200", capability=(9, 0))
SIZES = {"D": 704, "I": 576, "E": 4, "K": 2}
"""22 and 18 blocks of 32 columns: the last chunk of eight has six, or two as in 2880 = 90 * 32."""
NARROW = {"D": 320, "I": 320, "E": 8, "K": 1}
"""Ten blocks, so that many tokens are quickly done."""
WIDE = {"D": 1152, "I": 1152, "E": 4, "K": 2}
"""Five chunks, so that two warpgroups take turns at having the first one."""
WIDEST = {"D": 1344, "I": 1344, "E": 2, "K": 1}
"""Six, of which the last is a quarter, as in 2880."""
EIGHT = Launch(width=8, warps=4, stages=3)
BY_TWO = Launch(width=8, warps=8, stages=4)
BY_THREE = Launch(width=8, warps=12, stages=6)
SIXTEEN = Launch(width=16, warps=4, stages=2)

needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return decode_experts.compile_host(tmp_path_factory.mktemp("e4m3_host"), "host_e4m3.cpp")


@pytest.fixture
def on_cpu(host, monkeypatch):
    decode_experts.put_on_cpu(e4m3.EXPERTS, host, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "shape", "sizes"),
    [
        (1, EIGHT, SIZES),
        (7, EIGHT, SIZES),
        (17, SIXTEEN, SIZES),
        (30, Launch(width=24, warps=4, stages=3), SIZES),
        (18, EIGHT, SIZES),
        (3, BY_TWO, WIDE),
        (3, BY_THREE, WIDEST),
    ],
    ids=["one", "few", "many", "more", "hit_twice", "by_two_warpgroups", "by_three"],
)
@pytest.mark.usefixtures("on_cpu")
def test_the_kernel_gives_the_reference(tokens, shape, sizes):
    case = cases.make_case("drawn", tokens, sizes, experts_hit=2 if tokens == 18 else None)
    decode_experts.check(e4m3.EXPERTS, case, shape, with_exponents)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129])
@pytest.mark.usefixtures("on_cpu")
def test_any_number_of_tokens_is_taken(tokens):
    decode_experts.check(
        e4m3.EXPERTS, cases.make_case("drawn", tokens, NARROW), SIXTEEN, with_exponents
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"experts_hit": 3}, {"foreign": True}, {"large_values": True}],
    ids=["most_experts_empty", "foreign_ids", "clamped"],
)
@pytest.mark.usefixtures("on_cpu")
def test_experts_may_be_empty_or_elsewhere_and_values_large(options):
    sizes = {**NARROW, "E": 16, "K": 2}
    decode_experts.check(
        e4m3.EXPERTS, cases.make_case("drawn", 10, sizes, **options), SIXTEEN, with_exponents
    )


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_without_any_expert_here_the_sum_is_zero():
    arguments = cases.inputs(cases.make_case("drawn", 2, NARROW), 3, "cpu")
    arguments["expert_ids_TK"].fill_(-1)
    arguments["out_TD"].fill_(float("nan"))
    arguments["weights"] = with_exponents(arguments["weights"])
    e4m3.EXPERTS.launch(SIXTEEN, **arguments)
    assert (arguments["out_TD"] == 0).all()


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_the_ring_goes_round_within_a_tile_and_across_tiles():
    sizes = {"D": 704, "I": 1152, "E": 2, "K": 1}
    decode_experts.check(e4m3.EXPERTS, cases.make_case("drawn", 1, sizes), EIGHT, with_exponents)


def test_the_exponent_of_a_tile_follows_from_its_highest_scale_but_those_of_zeros():
    weights = cases.inputs(cases.make_case("drawn", 1, NARROW), 3, "cpu")["weights"]
    usual = tile_exponents(weights.down)
    values, scales = weights.down.values, weights.down.scales
    assert torch.equal(usual, scales.view(*usual.shape, -1).amax(dim=-1).int() - 6)
    row = TILE_ROWS + 7
    scales[2, row, 1], values.view(*scales.shape, 16)[2, row, 1] = 200, 0x08  # -0, 0
    scales[3, row, 4] = 180
    scales[4] = 2
    wanted = usual.clone()
    wanted[3, 1], wanted[4] = 180 - 6, 1
    assert torch.equal(tile_exponents(weights.down), wanted)


def _down(act_PI):
    """Return what down gives, its exact values, and the sum of the magnitudes of each row's weights."""
    arguments = cases.inputs(cases.make_case("drawn", len(act_PI), NARROW), 3, "cpu")
    ids_TK, weights = arguments["expert_ids_TK"], arguments["weights"]
    found = torch.full((len(act_PI), NARROW["D"]), float("nan"))
    e4m3.EXPERTS.down(SIXTEEN, act_PI, ids_TK, with_exponents(weights), found)
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
@pytest.mark.parametrize(
    ("lowest", "highest"), [(110, 124), (104, 124), (0, 3), (0, 30), (236, 240)]
)
@pytest.mark.usefixtures("on_cpu")
def test_weights_are_exact_over_14_powers_of_two_and_beyond_off_by_2_to_the_minus_18(
    lowest, highest
):
    source = torch.Generator().manual_seed(3)
    arguments = cases.inputs(cases.make_case("drawn", 5, NARROW), 3, "cpu")
    down, ids_P = arguments["weights"].down, arguments["expert_ids_TK"][:, 0]
    down.scales.copy_(torch.randint(lowest, highest + 1, down.scales.shape, generator=source))
    arguments["weights"].down_bias_ED.zero_()
    # Of activations: sums are near one. LIMIT: times its token's power of two, before its tile's, a sum has to fit
    # float32; activations of 2^100 would pass it.
    unit = 2.0 ** min(127 - highest, 90)
    act_PI = (torch.randn(5, NARROW["I"], generator=source).clamp(1 / 64) * unit).bfloat16()
    found = torch.full((len(act_PI), NARROW["D"]), float("nan"))
    weights = with_exponents(arguments["weights"])
    e4m3.EXPERTS.down(SIXTEEN, act_PI, arguments["expert_ids_TK"], weights, found)
    down_PDI = down.to_float(torch.float64)[ids_P]
    error = (found.double() - torch.einsum("pdi,pi->pd", down_PDI, act_PI.double())).abs()
    sums = torch.einsum("pdi,pi->pd", down_PDI.abs(), act_PI.abs().double())
    rounded = 6 * 2.0 ** (highest - 127 - 18) * act_PI.abs().double().sum(dim=1, keepdim=True)
    is_exact = highest - lowest <= 14
    assert (error <= 1e-6 * sums + (0 if is_exact else rounded)).all()
    assert is_exact or (error > 1e-6 * sums).any(), "nothing was rounded: the test asks for nothing"


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


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        (
            cases.GPT_OSS_20B,
            {
                2: e4m3.EIGHT,
                40: e4m3.EIGHT,
                41: e4m3.SIXTEEN,
                96: e4m3.SIXTEEN,
                97: e4m3.TWENTY_FOUR,
                256: e4m3.TWENTY_FOUR,
            },
        ),
        (
            cases.GPT_OSS_120B,
            {2: e4m3.EIGHT, 160: e4m3.EIGHT, 161: e4m3.SIXTEEN, 256: e4m3.SIXTEEN},
        ),
    ],
    ids=["20b", "120b"],
)
def test_a_shape_that_fits_is_chosen(sizes, wanted):
    assert {tokens: e4m3.choose(tokens, sizes) for tokens in wanted} == wanted
    assert all(e4m3.fits(shape, tokens, sizes) for tokens, shape in wanted.items())
    assert e4m3.MAX_TOKENS in wanted
    assert set(wanted.values()) <= set(e4m3.SHAPES)


@pytest.mark.parametrize("num_experts", [32, 64, 127, 128, 1024])
def test_sizes_that_are_taken_fit_at_every_number_of_tokens(num_experts):
    # Lists grow with experts per token: from some number on sizes are refused, by name.
    for chosen in (1, 4, 8, 16, 32):
        sizes = {"D": 2880, "I": 2880, "E": num_experts, "K": chosen}
        refused = "pass the shared memory" in (e4m3._limits(sizes) or "")
        fit = [
            e4m3.fits(e4m3.choose(t, sizes), t, sizes)
            for t in range(e4m3.FEWEST_TOKENS, e4m3.MAX_TOKENS + 1)
        ]
        assert refused != all(fit)


@needs_nvcc
@pytest.mark.parametrize(
    ("num_experts", "weight", "wanted"),
    [
        (32, "mxfp4", ["cuda_decode", *["cuda_e4m3"] * 3, "gluon_decode"]),
        (64, "mxfp4", ["cuda_decode", *["cuda_e4m3"] * 3, "gluon_decode"]),
        (128, "mxfp4", ["cuda_decode", *["cuda_e4m3"] * 3, "cuda_decode_many_tokens"]),
        (
            32,
            "fp8_block",
            ["cuda_decode", *["cuda_decode_few_experts"] * 2, *["cuda_decode_many_tokens"] * 2],
        ),
        (128, "fp8_block", ["cuda_decode", *["cuda_decode_many_tokens"] * 4]),
    ],
)
def test_what_is_bound_for_each_number_of_tokens(num_experts, weight, wanted):
    pytest.importorskip("triton")
    registry.load("moe_experts")
    bound = registry.bind(
        "moe_experts",
        formats={"activation": "bf16", "weight": weight},
        sizes={**cases.GPT_OSS_20B, "E": num_experts},
        device=H200,
    )
    decode = {
        (r.min_rows, r.max_rows): i.name for r, i in bound.table.items() if r.phase == "decode"
    }
    regimes = [(1, 1), (2, 16), (17, 48), (49, 256), (257, 512)]
    assert [decode[regime] for regime in regimes] == wanted


class _Formula:
    """Stages by the formula, in the place of the kernels; `spoil` is given what a stage wrote, and the ids."""

    def __init__(self, spoil=None):
        self.spoil = spoil or (lambda _out, _ids: None)

    def _product(self, x_PC, ids_P1, matrix, bias_EF):
        e_P = ids_P1[:, 0].clamp(min=0).long()
        weights = matrix.to_float(torch.float64)[e_P]
        return torch.einsum("pfc,pc->pf", weights, x_PC.double()) + bias_EF.double()[e_P]

    def gate_up(self, _shape, x_PC, ids_P1, weights, out_PI, *, alpha, limit):
        u_PF = self._product(x_PC, ids_P1, weights.weights.gate_up, weights.weights.gate_up_bias_EF)
        is_here_P = ids_P1[:, 0] >= 0
        hidden_PI = swiglu(u_PF, alpha=alpha, limit=limit).to(out_PI.dtype)
        out_PI[is_here_P] = hidden_PI[is_here_P]
        self.spoil(out_PI, ids_P1)

    def down(self, _shape, x_PC, ids_P1, weights, out_PD):
        y_PD = self._product(x_PC, ids_P1, weights.weights.down, weights.weights.down_bias_ED)
        is_here_P = ids_P1[:, 0] >= 0
        out_PD[is_here_P] = y_PD.float()[is_here_P]
        self.spoil(out_PD, ids_P1)


def _statuses(experts, shapes=e4m3.SHAPES[:1], columns=320):
    outcomes = list(e4m3_stages.check_stages(experts, shapes, columns=columns, device="cpu"))
    return [o.status for o in outcomes]


def test_stages_by_themselves_are_checked_in_every_shape():
    assert _statuses(_Formula(), e4m3.SHAPES) == ["ok"] * 6


def _swap_two_rows(out, ids_P1):
    first, second = torch.nonzero(ids_P1[:, 0] == 0)[:2, 0].tolist()
    out[[first, second]] = out[[second, first]]


def _write_a_row_that_is_elsewhere(out, ids_P1):
    out[ids_P1[:, 0] < 0] = 0.0


def _leave_the_last_tile(out, _ids):
    out[:, -32:] = float("nan")


@pytest.mark.parametrize(
    "spoil", [_swap_two_rows, _write_a_row_that_is_elsewhere, _leave_the_last_tile]
)
def test_a_stage_that_is_wrong_fails(spoil):
    assert _statuses(_Formula(spoil)) == ["failed"] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_stages_by_themselves_give_the_formula(monkeypatch):
    monkeypatch.setattr(e4m3_stages, "ROWS", 192)
    assert _statuses(e4m3.EXPERTS, [EIGHT], columns=704) == ["ok"] * 2
    assert _statuses(e4m3.EXPERTS, [SIXTEEN]) == ["ok"] * 2
