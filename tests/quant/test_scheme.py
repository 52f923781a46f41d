"""QuantConfig to formats by role; conversions between formats."""

import pytest
import torch

from rose.config.quant import WEIGHT_FORMATS, QuantConfig
from rose.kernels.formats import BF16, FLOAT32, FLOAT64, FP8_BLOCK, MXFP4, decode, plain
from rose.quant.encode import encode, is_lossless, requantize
from rose.quant.scheme import ROLES, scheme
from rose.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("weights", "experts", "projection"),
    [
        ("mxfp4", MXFP4, BF16),
        ("fp8_block", FP8_BLOCK, BF16),
        ("fp8_block_all", FP8_BLOCK, FP8_BLOCK),
        ("bf16", BF16, BF16),
        ("float32", FLOAT32, FLOAT32),
    ],
)
def test_formats_by_role(weights, experts, projection):
    s = scheme(QuantConfig(weights=weights, activations="bf16"))
    assert (s.experts, s.projection, s.head) == (experts, projection, projection)
    assert s.of_role("router") is s.of_role("embedding") is s.of_role("bias") is BF16
    assert s.of_role("norm") is s.of_role("sinks") is FLOAT32


@pytest.mark.parametrize("weights", ["mxfp4", "fp8_block_all", "float32"])
@pytest.mark.parametrize(("projections", "dense"), [("fp8_block", FP8_BLOCK), ("bf16", BF16)])
def test_projections_and_head_may_have_a_format_of_their_own(weights, projections, dense):
    plain = scheme(QuantConfig(weights=weights, activations="bf16"))
    s = scheme(QuantConfig(weights=weights, projections=projections, activations="bf16"))
    assert (s.experts, s.projection, s.head) == (plain.experts, dense, dense)


def test_a_format_that_projections_cannot_have_is_refused_with_those_they_can():
    with pytest.raises(
        ConfigError, match=r"projections='mxfp4' .* allowed: bf16, fp8_block; change"
    ):
        QuantConfig(projections="mxfp4")


def test_every_format_and_role_is_known():
    for weights in WEIGHT_FORMATS[1:]:
        for role in ROLES:
            assert scheme(QuantConfig(weights=weights, activations="float64")).of_role(role)


def test_auto_must_be_decided_first():
    with pytest.raises(ConfigError, match="resolve"):
        scheme(QuantConfig(activations="bf16"))


@pytest.mark.parametrize("source", [MXFP4, FP8_BLOCK, BF16, FLOAT32])
@pytest.mark.parametrize("target", [MXFP4, FP8_BLOCK, BF16, FLOAT32, FLOAT64])
def test_lossless_conversions_lose_nothing(source, target):
    w = torch.randn(70, 96, generator=torch.Generator().manual_seed(4))
    matrix = encode(w, source)
    out = requantize(matrix, target)
    assert out.format is target
    assert out.shape == matrix.shape
    if is_lossless(source, target):
        assert torch.equal(decode(out).double(), decode(matrix).double())
    elif (source, target) != (MXFP4, FP8_BLOCK):
        assert not torch.equal(decode(out).double(), decode(matrix).double())


def test_the_same_format_is_not_copied():
    m = plain(torch.randn(3, 4))
    assert requantize(m, FLOAT32) is m
