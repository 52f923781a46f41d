"""Formats: shapes, bytes, decoding of short tiles, and what views and copies keep. Vectors are in tests/quant."""

from __future__ import annotations

import copy

import pytest
import torch

from rose.kernels.draw import generator, matrix
from rose.kernels.formats import BF16, FORMATS, FP8_BLOCK, MXFP4, FormattedTensor, plain


@pytest.mark.parametrize("name", ["float32", "bf16", "mxfp4", "fp8_block"])
def test_a_copy_decodes_to_the_same_numbers(name):
    drawn = matrix(name, 3, 200, 192, source=generator("cpu", 0))
    for copied in (copy.deepcopy(drawn), drawn.to("cpu")):
        assert copied.shape == (3, 200, 192)
        assert torch.equal(copied.to_float(), drawn.to_float())


@pytest.mark.parametrize("name", ["float32", "bf16", "mxfp4", "fp8_block"])
def test_one_matrix_of_a_stack_is_a_view(name):
    drawn = matrix(name, 3, 200, 192, source=generator("cpu", 0))
    assert drawn[1].shape == (200, 192)
    assert torch.equal(drawn[1].to_float(), drawn.to_float()[1])
    assert drawn[1].values.data_ptr() == drawn.values[1].data_ptr()
    assert sum(drawn[e].num_bytes for e in range(3)) == drawn.num_bytes


@pytest.mark.parametrize("name", ["float64", "float32", "bf16", "mxfp4", "fp8_block"])
@pytest.mark.parametrize("shape", [(128, 128), (200, 192), (5760, 2880)])
def test_bytes_are_counted_without_the_tensor(name, shape):
    drawn = matrix(name, *shape, source=generator("cpu", 0))
    assert FORMATS[name].num_bytes(*shape) == drawn.num_bytes


def test_short_tiles_take_the_last_scale():
    values = torch.ones(130, 192).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    numbers = FormattedTensor(format=FP8_BLOCK, values=values, scales=scales).to_float()
    assert (numbers[:128, :128] == 1).all()
    assert (numbers[:128, 128:] == 2).all()
    assert (numbers[128:, :128] == 4).all()
    assert (numbers[128:, 128:] == 8).all()


def test_formats_without_scales_refuse_to_shape_them():
    assert MXFP4.scale_shape(3, 64) == (3, 2)
    with pytest.raises(ValueError, match="bf16 has no scales"):
        BF16.scale_shape(3, 64)


def test_plain_wraps_without_a_copy():
    values = torch.ones(2, 2, dtype=torch.float64)
    wrapped = plain(values)
    assert wrapped.values is values
    assert wrapped.to_float(torch.float64) is values
