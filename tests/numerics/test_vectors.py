"""Published numbers of each step of gpt-oss: rotary angles, norm, sinks, windows, SwiGLU, routing.

Each is held against the reference model and, where a kernel computes it, against every implementation that runs
on a CPU. MXFP4 and FP8 vectors are in tests/quant; the end-to-end vector is in tests/models/gpt_oss.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from fakes.gpt_oss import hashed
from rose.kernels import registry
from rose.kernels.formats import FP8_BLOCK, plain
from rose.kernels.weights import ExpertWeights, LinearWeights
from rose.layers.rotary import Yarn
from rose.models.gpt_oss import reference
from rose.models.gpt_oss.config import alternating_windows, published
from rose.models.gpt_oss.model import yarn
from rose.models.gpt_oss.reference import ReferenceConfig
from rose.quant.fp8 import encode

HANDED = {
    case["id"]: case
    for line in (Path(__file__).parents[1] / "data" / "handed.jsonl").read_text().splitlines()
    for case in [json.loads(line)]
}
GPT_OSS = ReferenceConfig(
    num_layers=24, num_q_heads=64, num_kv_heads=8, head_dim=64, experts_per_token=4
)
CONCENTRATION = 1.3465735902799727
FREQUENCIES = [
    *(1.0, 0.68904431, 0.47478206, 0.32714587, 0.22541800, 0.15532299, 0.10702442, 0.073744568),
    *(0.050813275, 0.031705696, 0.019335001, 0.011592049, 0.0067949595, 0.0038603593),
    *(0.0020937924, 0.0010526021, 4.5648392e-4, 1.2931870e-4, 3.8308812e-5, 2.6396469e-5),
    *(1.8188337e-5, 1.2532570e-5, 8.6354959e-6, 5.9502393e-6, 4.0999785e-6, 2.8250668e-6),
    *(1.9465962e-6, 1.3412910e-6, 9.2420895e-7, 6.3682091e-7, 4.3879783e-7, 3.0235114e-7),
]


def implementations(name):
    """Every implementation that runs on a CPU without more than torch."""
    return [i for i in registry.implementations(name) if i.device != "cuda"]


def each(name):
    return pytest.mark.parametrize(
        "kernel", [pytest.param(prepared(i), id=i.name) for i in implementations(name)]
    )


def prepared(implementation):
    """Its function, on weights as the operation has them."""
    if implementation.prepare is None:
        return implementation.function

    def call(*operands, weights, **more):
        implementation.function(*operands, weights=implementation.prepare(weights), **more)

    return call


@pytest.fixture(scope="module")
def scaling() -> Yarn:
    return yarn(published("20b"))


def test_yarn_bounds_are_not_rounded(scaling):
    assert scaling.concentration == pytest.approx(CONCENTRATION, rel=1e-15)
    assert scaling.concentration**2 == pytest.approx(1.8132604340394958, rel=1e-14)
    assert scaling.bound(32) == pytest.approx(8.092779115512402, rel=1e-14)
    assert scaling.bound(1) == pytest.approx(17.39802450158856, rel=1e-14)


def test_yarn_frequencies(scaling):
    theirs, concentration = reference.yarn_frequencies(GPT_OSS, torch.float64)
    assert concentration == scaling.concentration
    assert torch.allclose(theirs, scaling.frequencies(), rtol=1e-14)
    assert scaling.frequencies().tolist() == pytest.approx(FREQUENCIES, rel=3e-8)


def test_yarn_keeps_a_share_of_each_frequency(scaling):
    kept = 150000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    share = (scaling.frequencies() / kept - 1 / 32) / (1 - 1 / 32)
    wanted = {8: 1.0, 9: 0.90250436, 13: 0.47263928, 17: 0.04277421, 18: 0.0}
    for pair, expected in wanted.items():
        assert share[pair].item() == pytest.approx(expected, abs=1e-8)
    truncated = {9: 0.031620752, 12: 0.0070157139, 17: 2.2794780e-4}
    for pair, wrong in truncated.items():
        assert scaling.frequencies()[pair].item() != pytest.approx(wrong, rel=1e-3)


@pytest.mark.parametrize(
    ("position", "pair", "cos", "sin"),
    [
        (1, 0, 0.7275568158, 1.1331026051),
        (1000, 10, 1.1910003119, 0.6283141659),
        (4095, 15, -0.5268393558, -1.2392339276),
        (131071, 20, -0.9782416580, 0.9253667882),
    ],
)
def test_angles(scaling, position, pair, cos, sin):
    angle = position * scaling.frequencies()[pair].item()
    exact = (CONCENTRATION * math.cos(angle), CONCENTRATION * math.sin(angle))
    assert exact == pytest.approx((cos, sin), abs=1e-9)
    table_PD = scaling.table(position + 1, dtype=torch.float32, device="cpu")
    row_D = table_PD[position]
    # A float32 frequency and the float32 product are off by about 2^-23 of the angle.
    assert row_D[[pair, 32 + pair]].tolist() == pytest.approx((cos, sin), abs=1e-6 + 2.4e-7 * angle)


def test_the_table_is_the_float32_one_of_the_published_models(scaling):
    row_D = scaling.table(1001, dtype=torch.float32, device="cpu")[1000]
    assert row_D[[10, 42]].tolist() == pytest.approx((1.1910016537, 0.6283116937), abs=2e-7)


@each("rope_kv_write")
def test_rotation_of_a_ramp(kernel, scaling):
    qkv_TF = torch.zeros(1, 3 * 64, dtype=torch.float64)
    qkv_TF[0, :64] = qkv_TF[0, 64:128] = torch.arange(64) / 64
    kv_pages = torch.zeros(1, 2, 1, 16, 64, dtype=torch.float64)
    kernel(
        qkv_TF,
        torch.tensor([3]),
        scaling.table(4, dtype=torch.float64, device="cpu"),
        torch.tensor([5]),
        kv_pages=kv_pages,
    )
    wanted = {0: -0.0950142380, 1: -0.6205641557, 31: 0.6522453805}
    wanted |= {32: -0.6665488752, 33: -0.3121422953, 63: 1.3255339696}
    for rotated_D in (qkv_TF[0, :64], kv_pages[0, 0, 0, 5]):
        assert {i: rotated_D[i].item() for i in wanted} == pytest.approx(wanted, abs=1e-6)
        ratio = rotated_D.norm() / (torch.arange(64) / 64).double().norm()
        assert ratio.item() == pytest.approx(CONCENTRATION, rel=1e-9)


@each("rms_norm")
@pytest.mark.parametrize(
    ("x", "weight", "wanted"),
    [
        ([1, -2, 3, 0.5], [1, 0.5, 2, -1], [0.5298122, -0.5298122, 3.1788732, -0.2649061]),
        (
            [0.001, 0.002, -0.001, 0.004],  # eps is a good part of the mean square
            [1, 1, 1, 1],
            [0.25400026, 0.50800052, -0.25400026, 1.01600105],
        ),
    ],
)
def test_rms_norm(kernel, x, weight, wanted):
    x_TD = torch.tensor([x])
    out_TD = torch.empty_like(x_TD)
    kernel(x_TD, torch.tensor(weight).float(), eps=1e-5, residual_TD=None, out_TD=out_TD)
    assert out_TD[0].tolist() == pytest.approx(wanted, rel=1e-6)
    theirs = reference.rms_norm(x_TD.double(), torch.tensor(weight).double(), 1e-5)
    assert theirs[0].tolist() == pytest.approx(wanted, rel=1e-6)


def attend(kernel, q_QHD, k_KGD, v_KGD, sinks, *, scale=None, window=None):
    """One prompt through prefill attention, or its queries one by one through decode attention."""
    num_keys, kv_heads, head_dim = k_KGD.shape
    num_queries = len(q_QHD)
    columns = -(-num_keys // 16)
    kv_pages = torch.zeros(columns, 2, kv_heads, 16, head_dim, dtype=q_QHD.dtype)
    for position in range(num_keys):
        kv_pages[position // 16, 0, :, position % 16] = k_KGD[position]
        kv_pages[position // 16, 1, :, position % 16] = v_KGD[position]
    table_SP = torch.arange(columns, dtype=torch.int32)[None]
    shared = {"scale": scale or head_dim**-0.5, "window_tokens": window}
    sinks_H, out_QHD = torch.tensor(sinks, dtype=q_QHD.dtype), torch.empty_like(q_QHD)
    if "prefill" in kernel.__module__:
        kernel(
            q_QHD,
            kv_pages,
            table_SP,
            torch.tensor([0, num_queries], dtype=torch.int32),
            torch.tensor([num_keys], dtype=torch.int32),
            sinks_H,
            max_query_tokens=num_queries,
            out_THD=out_QHD,
            **shared,
        )
        return out_QHD
    kernel(
        q_QHD,
        kv_pages,
        table_SP.expand(num_queries, -1),
        torch.arange(num_keys - num_queries + 1, num_keys + 1, dtype=torch.int32),
        sinks_H,
        max_length=num_keys,
        out_SHD=out_QHD,
        **shared,
    )
    return out_QHD


ATTENTION = [*implementations("attention_prefill"), *implementations("attention_decode")]


def each_attention():
    return pytest.mark.parametrize(
        "kernel", [pytest.param(i.function, id=f"{i.operation}-{i.name}") for i in ATTENTION]
    )


def exactness(kernel):
    """The last printed digit, or two steps of float32 at 1 for kernels that compute in float32 whatever comes."""
    formats = next(i.formats for i in ATTENTION if i.function is kernel)
    return 2e-8 if "float64" in formats.get("activation", {"float64"}) else 2.4e-7


@each_attention()
@pytest.mark.parametrize(
    ("logits", "sink", "weights"),
    [
        ([0.5, -1, 2], 1.0, [0.13598892, 0.03034323, 0.60946004]),
        ([-3, -3], 0.0, [0.0452785, 0.0452785]),
    ],
)
def test_a_sink_takes_its_share_of_the_softmax(kernel, logits, sink, weights):
    # One query whose products with the keys are the logits; values pick out the weight of each key.
    num_keys = len(logits)
    k_KGD = torch.zeros(num_keys, 1, 4, dtype=torch.float64)
    k_KGD[:, 0, 0] = torch.tensor(logits)
    v_KGD = torch.eye(num_keys, 4, dtype=torch.float64)[:, None]
    q_QHD = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64).view(1, 1, 4)
    out_QHD = attend(kernel, q_QHD, k_KGD, v_KGD, [sink], scale=1.0)
    assert out_QHD[0, 0, :num_keys].tolist() == pytest.approx(weights, abs=1e-7)


ROW_4 = {
    None: [
        *(-0.72606876, 0.52184852, 1.26055642, 1.38697333),
        *(-0.48566256, 0.01431105, 0.93931433, 0.81744107),
    ],
    3: [
        *(-0.80318555, 0.60693892, 1.33660332, 1.47964785),
        *(-0.76974608, 0.24219159, 1.15989166, 1.0401094),
    ],
}
ROW_0 = [
    *(0.27340635, -0.13762651, 0.29592857, 0.31355801),
    *(0.53149786, -0.26754389, 0.57528072, 0.60955208),
]


@each_attention()
@pytest.mark.parametrize("window", [None, 3])
def test_attention_of_five_tokens(kernel, window):
    q, k, v = hashed(1, (5, 2, 4), 2), hashed(2, (5, 1, 4), 2), hashed(3, (5, 1, 4), 2)
    sinks = torch.tensor([0.3, -0.7], dtype=torch.float64)
    for out_QHD in (
        attend(kernel, q, k, v, sinks.tolist(), scale=0.5, window=window),
        reference.attention(q, k, v, sinks, window_tokens=window),
    ):
        near = exactness(kernel)
        assert out_QHD[4].flatten().tolist() == pytest.approx(ROW_4[window], abs=near)
        assert out_QHD[0].flatten().tolist() == pytest.approx(ROW_0, abs=near)


@each_attention()
def test_handed_sink_mass(kernel):
    case = HANDED["num-sink-mass"]
    sinks, num_keys = case["input"]["sink_logits"], case["input"]["keys"]
    q_QHD = torch.zeros(1, len(sinks), 16)
    k_KGD, v_KGD = torch.randn(num_keys, 1, 16), torch.ones(num_keys, 1, 16)
    out_QHD = attend(kernel, q_QHD, k_KGD, v_KGD, sinks)
    wanted = torch.tensor(case["expected"]["output_every_dim"])[:, None].expand(-1, 16)
    assert torch.allclose(out_QHD[0], wanted, atol=case["expected"]["atol"])
    assert (out_QHD[0, 3] - wanted[3]).abs().max() < 1e-6  # far tighter than asked


@each_attention()
@pytest.mark.parametrize("layer", [0, 1])
def test_handed_window_keys(kernel, layer):
    case = HANDED["num-window-keys"]
    length, window = case["input"]["seq_len"], case["input"]["sliding_window"]
    windows = alternating_windows(2, window)
    # All products are equal, and each value says where it stands: what is seen is what is not zero.
    q_QHD = torch.zeros(length, 1, length)
    k_KGD, v_KGD = torch.zeros(length, 1, length), torch.eye(length)[:, None]
    out_QHD = attend(kernel, q_QHD, k_KGD, v_KGD, [0.0], window=windows[layer])
    found = []
    for position in case["input"]["query_positions"]:
        seen = torch.nonzero(out_QHD[position, 0] > 0).flatten().tolist()
        assert seen == list(range(seen[0], seen[-1] + 1))
        found.append([seen[0], seen[-1]])
    assert found == case["expected"]["visible_key_ranges_inclusive"][f"layer {layer}"]


SWIGLU = [
    (
        [1, 2, 10, 0.5, -10, -9, 0, 3, 7.5, 8],
        [2.53738730, 10.4999297, 2.43477678e-06, 0, 55.9996250],
        {"rel": 1e-6},
    ),
    (
        HANDED["num-swiglu-clamp"]["input"]["interleaved_input"],
        HANDED["num-swiglu-clamp"]["expected"]["output"],
        {
            "rel": HANDED["num-swiglu-clamp"]["expected"]["rtol"],
            "abs": HANDED["num-swiglu-clamp"]["expected"]["atol"],
        },
    ),
]


@each("moe_experts")
@pytest.mark.parametrize(("u", "wanted", "tolerance"), SWIGLU)
def test_swiglu_is_clamped_on_the_right_sides(kernel, u, wanted, tolerance):
    inner = len(u) // 2
    # One expert whose gate_up gives just its bias, and whose down is the identity.
    weights = ExpertWeights(
        gate_up=plain(torch.zeros(1, 2 * inner, inner)),
        gate_up_bias_EF=torch.tensor([u], dtype=torch.float32),
        down=plain(torch.eye(inner)[None]),
        down_bias_ED=torch.zeros(1, inner),
    )
    out_TD = torch.empty(1, inner)
    kernel(
        torch.zeros(1, inner),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, 1),
        weights=weights,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        out_TD=out_TD,
    )
    assert out_TD[0].tolist() == pytest.approx(wanted, **tolerance)
    theirs = reference.swiglu(torch.tensor(u, dtype=torch.float64), 1.702, 7.0)
    assert theirs.tolist() == pytest.approx(wanted, **tolerance)


ROUTER_LOGITS = [0.1, 2.0, -1.0, 1.5, 0.3, 1.9, -0.2, 0.0]


@each("moe_route")
def test_routing(kernel):
    ids_TK, weights_TK = torch.empty(1, 4, dtype=torch.int32), torch.empty(1, 4)
    weights = LinearWeights(matrix=plain(torch.zeros(8, 2)), bias_N=torch.tensor(ROUTER_LOGITS))
    kernel(torch.zeros(1, 2), weights=weights, expert_ids_TK=ids_TK, expert_weights_TK=weights_TK)
    theirs = reference.route(torch.tensor([ROUTER_LOGITS]), 4)
    for ids, shares in ((ids_TK, weights_TK), theirs):
        assert ids[0].tolist() == [1, 5, 3, 4]
        wanted = [0.37118814, 0.33586492, 0.22513699, 0.06780996]
        assert shares[0].tolist() == pytest.approx(wanted, rel=1e-6)


@each("moe_route")
def test_equal_logits_go_to_the_lower_expert(kernel):
    ids_TK, weights_TK = torch.empty(1, 3, dtype=torch.int32), torch.empty(1, 3)
    weights = LinearWeights(
        matrix=plain(torch.zeros(6, 2)), bias_N=torch.tensor([0.0, 1, 0, 1, 0, 1])
    )
    kernel(torch.zeros(1, 2), weights=weights, expert_ids_TK=ids_TK, expert_weights_TK=weights_TK)
    assert ids_TK[0].tolist() == [1, 3, 5]


def test_handed_fp8_scale_shapes():
    case = HANDED["cfg-fp8-scale-shapes"]
    for name, (rows, columns) in case["input"]["weights"].items():
        assert list(FP8_BLOCK.scale_shape(rows, columns)) == case["expected"]["scale_shapes"][name]
    rows, columns = 130, 2880
    matrix = encode(torch.full((rows, columns), 0.75))
    assert columns - (matrix.scales.shape[1] - 1) * 128 == case["expected"]["last_block_width"]
    assert matrix.scales.unique().numel() == 1  # the padding moved no amax
    assert (matrix.to_float() == 0.75).all()
