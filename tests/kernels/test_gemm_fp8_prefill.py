"""Projections in E4M3 tiles during prefill: the matrix is widened without loss, and on Hopper that is what is bound."""

from __future__ import annotations

import importlib

import pytest
import torch

from rose.kernels import registry
from rose.kernels.cases import compare, poison
from rose.kernels.draw import generator, matrix
from rose.kernels.formats import BF16, decode
from rose.kernels.gemm import cases
from rose.kernels.gemm.reference import reference
from rose.utils.device import H200

registry.load("gemm")
impl = importlib.import_module("rose.kernels.gemm.torch_fp8_impl")


@pytest.mark.parametrize("shape", [(1, 16), (127, 129), (128, 128), (300, 2880)])
def test_widening_loses_nothing(shape):
    tiles = matrix("fp8_block", *shape, source=generator("cpu", 7))
    wide = impl.widened(tiles)
    assert wide.format is BF16
    assert torch.equal(wide.values.float(), decode(tiles))


@pytest.mark.parametrize("residual", [None, "apart", "in_place"])
def test_products_are_those_of_the_tiles(residual):
    case = cases.make_case(
        "short_tiles", 70, {"N": 150, "K": 208}, weight="fp8_block", residual=residual
    )
    arguments = cases.inputs(case, 3, "cpu")
    wanted = {**arguments, "out_TN": arguments["out_TN"].float()}
    reference(**wanted)
    if residual != "in_place":
        poison(arguments["out_TN"])
    impl.gemm(**arguments)
    assert compare("out_TN", arguments["out_TN"], wanted["out_TN"], cases.tolerance(case)) is None


def test_on_hopper_decode_reads_the_tiles_and_prefill_widens_them():
    pytest.importorskip("triton")
    bound = registry.bind(
        "gemm",
        formats={"activation": "bf16", "weight": "fp8_block"},
        sizes={"N": 5120, "K": 2880},
        device=H200,
    )
    names = {(row.regime.phase, row.implementation) for row in bound.rows()}
    assert ("prefill", "torch_fp8") in names
    assert "torch" not in {name for _, name in names}
