"""MXFP4: published vectors, exact decoding over every scale, lossless encoding of what was MXFP4."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.kernels.formats import MXFP4, FormattedTensor, decode
from rose.quant import mxfp4
from rose.quant.powers import power_of_two, smallest_exponent
from rose.utils.errors import CheckpointError


def _one_block(first_bytes, scale):
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, : len(first_bytes)] = torch.tensor(first_bytes, dtype=torch.uint8)
    return FormattedTensor(
        format=MXFP4, values=blocks, scales=torch.tensor([[scale]], dtype=torch.uint8)
    )


@pytest.mark.parametrize(
    ("byte", "scale", "low", "high"),
    [
        (0x21, 127, 0.5, 1.0),
        (0x7F, 127, -6, 6),
        (0xF7, 127, 6, -6),
        (0x53, 120, 0.01171875, 0.0234375),
        (0x9A, 130, -8, -4),
        (0x6E, 100, -2.98023224e-8, 2.98023224e-8),
        (0x80, 127, 0.0, -0.0),
    ],
)
def test_bytes_decode_to_the_published_numbers(byte, scale, low, high):
    got = decode(_one_block([byte], scale))[0, :2].tolist()
    assert got == pytest.approx([low, high], rel=1e-8)
    assert [math.copysign(1, g) for g in got] == [math.copysign(1, v) for v in (low, high)]


def test_a_block_decodes_to_the_published_numbers():
    block = decode(_one_block([(7 * j + 3) % 256 for j in range(16)], 121))[0]
    head = [0.0234375, 0, -0.015625, 0, 0.0078125, 0.0078125, -0.0, 0.0078125]
    assert block[:8].tolist() == head
    assert block[28:].tolist() == [0.046875, 0.0625, -0.03125, 0.0625]
    assert block.sum().item() == 0.4296875


def test_decoding_is_exact_at_every_scale():
    codes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for scale in range(253):  # above, 6 x 2^126 and more is past float32
        got = decode(_one_block([0x10, 0x32, 0x54, 0x76], scale))[0, :8].tolist()
        assert got == [math.ldexp(c, scale - 127) for c in codes], scale


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 5), seed=st.integers(0, 999))
def test_what_was_mxfp4_comes_back_without_loss(rows, blocks, seed):
    g = torch.Generator().manual_seed(seed)
    m = FormattedTensor(
        format=MXFP4,
        values=torch.randint(0, 256, (rows, blocks, 16), generator=g, dtype=torch.uint8),
        scales=torch.randint(4, 250, (rows, blocks), generator=g, dtype=torch.uint8),
    )
    numbers = decode(m).bfloat16()
    again = decode(mxfp4.encode(numbers))
    assert torch.equal(again, numbers.float())
    assert torch.equal(torch.signbit(again), torch.signbit(numbers))


def test_rounding_is_to_the_nearest_code_and_ties_to_even():
    x = torch.tensor(
        [0.25, 0.26, 0.75, 0.74, 1.25, 1.75, 2.5, 2.51, 3.5, 5.0, 5.01, 6.0, -0.3, -5.0]
    )
    w = torch.zeros(1, 32)
    w[0, : len(x)] = x
    expected = [0, 0.5, 1, 0.5, 1, 2, 2, 3, 4, 4, 6, 6, -0.5, -4]
    assert decode(mxfp4.encode(w))[0, : len(x)].tolist() == expected


def test_zero_blocks_have_scale_one_and_ragged_columns_are_refused():
    assert mxfp4.encode(torch.zeros(2, 64)).scales.tolist() == [[127, 127]] * 2
    with pytest.raises(CheckpointError, match="multiple of 32"):
        mxfp4.encode(torch.zeros(2, 40))


def test_nan_scales_are_refused_by_name():
    with pytest.raises(CheckpointError, match="layer_scales holds the scale byte 255"):
        mxfp4.check_scales(torch.tensor([1, 255], dtype=torch.uint8), "layer_scales")


def test_powers_of_two_are_exact_from_subnormals_to_the_largest():
    exponents = torch.arange(-149, 128)
    assert power_of_two(exponents).tolist() == [math.ldexp(1.0, int(e)) for e in exponents]


@settings(deadline=None)
@given(st.floats(min_value=2.0**-110, max_value=2.0**110, width=32))
def test_the_exponent_is_the_smallest_that_fits(amax):
    t = int(smallest_exponent(torch.tensor([amax]), largest=448.0))
    assert amax <= math.ldexp(448.0, t)
    assert amax > math.ldexp(448.0, t - 1)
