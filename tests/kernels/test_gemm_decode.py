"""The decode projections mean what the reference means."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

import gluon_emulator as emulator

from rose.kernels import registry
from rose.kernels.cases import compare
from rose.kernels.gemm import cases
from rose.kernels.gemm import gluon_decode_device as device
from rose.kernels.gemm.reference import reference

registry.load("gemm")
impl = importlib.import_module("rose.kernels.gemm.gluon_decode_impl")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(device, "gemm_kernel", emulator.Launcher(device.gemm_kernel))


def _check(case, shape) -> None:
    arguments = cases.inputs(case, 3, "cpu")
    wanted = {**arguments, "out_TN": arguments["out_TN"].float()}
    reference(**wanted)
    if case.options["residual"] != "in_place":
        arguments["out_TN"].fill_(float("nan"))
    impl.launch(shape, **arguments)
    difference = compare("out_TN", arguments["out_TN"], wanted["out_TN"], cases.tolerance(case))
    assert difference is None, difference


@pytest.mark.parametrize(
    "shape",
    [
        impl.Launch(rows=16, parts=4, units=2, stages=3),
        impl.Launch(rows=64, parts=1, warps_m=2, units=1, stages=2),
        impl.Launch(rows=32, parts=2, tokens=16, units=2, stages=1),
    ],
    ids=["parts", "wide", "sixteen"],
)
@pytest.mark.parametrize("tokens", [1, 19])
def test_each_way_to_share_out_the_matrix_gives_the_reference(shape, tokens):
    _check(cases.make_case("drawn", tokens, {"N": 96, "K": 320}), shape)


@pytest.mark.parametrize(
    "options",
    [
        {"residual": "apart"},
        {"residual": "in_place", "bias": False},
        {"is_strided": True},
        {"out": "float32", "bias": False},
    ],
    ids=["residual", "in_place", "strided_rows", "float32_logits"],
)
def test_bias_residual_strides_and_logits(options):
    case = cases.make_case("drawn", 5, {"N": 100, "K": 96}, **options)
    _check(case, impl.choose(5, case.sizes))
