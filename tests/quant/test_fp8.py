"""FP8: published vectors, exactness from MXFP4, agreement of the table with decode-and-encode."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.kernels.formats import FP8_BLOCK, MXFP4, FormattedTensor, decode
from rose.quant import fp8
from rose.quant.encode import encode
from rose.utils.errors import CheckpointError

CASES = Path(__file__).parents[1] / "data" / "handed.jsonl"


def test_rounding_of_e4m3_is_to_the_nearest_even():
    x = torch.tensor(
        [0.3, 1 / 3, 17, 100, 250, 440, 464, 2.0**-9, 2.0**-10, 1e9, -1e9, float("inf")]
    )
    expected = [0.3125, 0.34375, 16, 96, 256, 448, 448, 2.0**-9, 0, 448, -448, 448]
    assert fp8.to_e4m3(x).float().tolist() == expected


def _vector_18():
    r, c = torch.meshgrid(torch.arange(2880), torch.arange(2880), indexing="ij")
    w = ((31 * r + 17 * c) % 13 - 6).float() / 8
    w[:, 2816:] *= 2
    return w


def test_published_blocks_with_power_of_two_scales():
    w = _vector_18()
    m = fp8.encode(w)
    assert m.scales.shape == (23, 23)
    assert m.scales[0, 0] == 2.0**-9
    assert m.scales[22, 22] == 2.0**-8
    assert m.values[0, :6].float().tolist() == [-384, -128, 128, 384, -192, 64]
    assert torch.equal(decode(m), w)


def test_published_blocks_with_float_scales():
    w = _vector_18()
    q, scales = fp8.quantize_blocks(w, (128, 128))
    assert scales[0, 0].item() == pytest.approx(0.00167410716, rel=1e-7)
    assert scales[22, 22].item() == pytest.approx(0.00334821432, rel=1e-7)
    assert q[0, :6].float().tolist() == [-448, -144, 144, 448, -224, 72]
    back = decode(FormattedTensor(format=FP8_BLOCK, values=q, scales=scales))
    expected = torch.tensor([-0.75, -0.24107143, 0.24107143, 0.75, -0.375, 0.12053572])
    torch.testing.assert_close(back[0, :6], expected, rtol=1e-6, atol=0)
    assert (back - w).abs().max().item() == pytest.approx(0.0357142687, rel=1e-6)


def test_small_tiles_keep_their_scale_and_zero_tiles_have_one():
    w = torch.zeros(256, 128)
    w[3, 5] = 6 * 2.0**-7
    w[200, 5] = 6 * 2.0**-60
    m = fp8.encode(w)
    assert m.scales[0, 0].item() == 2.0**-13 == 1.220703125e-4
    assert torch.equal(decode(m), w), "no clamp on the amax of weights"
    assert fp8.encode(torch.zeros(128, 128)).scales.item() == 1.0
    _, scales = fp8.quantize_blocks(w[:128], (128, 128))
    assert scales.item() == pytest.approx(1.04631697e-4, rel=1e-6)


def test_scale_shapes_of_sizes_that_128_does_not_divide():
    """The case cfg-fp8-scale-shapes; its sizes, and that zero padding leaves amax alone."""
    lines = map(json.loads, CASES.read_text().splitlines())
    case = next(c for c in lines if c["id"] == "cfg-fp8-scale-shapes")
    for name, shape in case["input"]["weights"].items():
        expected = tuple(case["expected"]["scale_shapes"][name])
        assert FP8_BLOCK.scale_shape(*shape) == expected
    w = torch.full((2880, 2880), -3.0)
    m = fp8.encode(w)
    assert m.scales.shape == tuple(case["expected"]["scale_shapes"]["expert down (2880 x 2880)"])
    assert m.values.shape == w.shape
    assert torch.equal(fp8.tile_amax(w, (128, 128)), torch.full((23, 23), 3.0))
    assert case["expected"]["last_block_width"] == 2880 - 22 * 128


def _mxfp4(rows, columns, seed, low, high):
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, columns // 32, 16), generator=g, dtype=torch.uint8)
    scales = torch.randint(low, high + 1, (rows, columns // 32), generator=g, dtype=torch.uint8)
    return FormattedTensor(format=MXFP4, values=blocks, scales=scales)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 300),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 999),
    low=st.integers(20, 200),
    span=st.integers(0, 14),
)
def test_mxfp4_is_exact_up_to_a_span_of_14(rows, blocks, seed, low, span):
    m = _mxfp4(rows, blocks * 32, seed, low, low + span)
    out = fp8.from_mxfp4(m)
    assert int(fp8.exponent_spans(m).max()) <= span
    assert torch.equal(decode(out), decode(m))
    assert torch.equal(torch.signbit(decode(out)), torch.signbit(decode(m)))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 300),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 999),
    low=st.integers(0, 220),
)
def test_the_table_equals_decoding_and_encoding(rows, blocks, seed, low):
    m = _mxfp4(rows, blocks * 32, seed, low, low + 30)
    m.values[: rows // 3] = 0
    by_table, by_numbers = fp8.from_mxfp4(m), fp8.encode(decode(m))
    assert torch.equal(by_table.scales, by_numbers.scales)
    assert torch.equal(by_table.values.view(torch.uint8), by_numbers.values.view(torch.uint8))


def test_a_span_of_15_is_inexact_and_zero_blocks_do_not_count():
    blocks = torch.zeros(128, 4, 16, dtype=torch.uint8)
    blocks[0, 0, 0], blocks[1, 1, 0] = 7, 1  # 6 and 0.5
    scales = torch.full((128, 4), 127, dtype=torch.uint8)
    scales[1, 1] = 127 - 15
    scales[2, 2] = 3  # a block of zeros, far away
    m = FormattedTensor(format=MXFP4, values=blocks, scales=scales)
    assert fp8.exponent_spans(m).item() == 15
    assert not torch.equal(decode(fp8.from_mxfp4(m)), decode(m))
    scales[1, 1] += 1
    assert fp8.exponent_spans(m).item() == 14
    assert torch.equal(decode(fp8.from_mxfp4(m)), decode(m))


def test_encoding_again_changes_no_number():
    w = torch.randn(300, 200, generator=torch.Generator().manual_seed(1)) * 0.1
    once = fp8.encode(w)
    assert torch.equal(decode(fp8.encode(decode(once))), decode(once))


def test_error_of_random_weights_is_within_half_a_step():
    """E4M3 has 3 mantissa bits: relative error at most 1/16 above its subnormals, 2^-10 of a scale below."""
    w = torch.randn(257, 333, generator=torch.Generator().manual_seed(2))
    m = fp8.encode(w)
    step = fp8.spread_blocks(m.scales, (128, 128), w)
    assert ((decode(m) - w).abs() <= torch.maximum(w.abs() / 16, step * 2.0**-10)).all()


@pytest.mark.parametrize("group", [64, 128])
def test_activation_groups_follow_the_contract(group):
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[2] = 0
    values, scales = fp8.quantize_activation(x, group)
    assert scales.shape == (5, math.ceil(200 / group))
    for t in range(5):
        for b in range(scales.shape[1]):
            part = x[t, b * group : (b + 1) * group].float()
            scale = max(part.abs().max().item(), 1e-4) / 448
            assert scales[t, b].item() == pytest.approx(scale, rel=1e-6)
            got = values[t, b * group : (b + 1) * group].float()
            assert torch.equal(got, fp8.to_e4m3(part / scales[t, b]).float())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("form", [FP8_BLOCK, MXFP4])
def test_weights_that_are_no_numbers_are_refused(bad, form):
    w = torch.ones(40, 64)
    w[7, 3] = bad
    with pytest.raises(CheckpointError, match=f"{form.name} hold NaN or infinity"):
        encode(w, form)
