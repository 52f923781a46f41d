"""The CUDA router, as far as a machine without a GPU can tell; `rose.kernels check` holds it to the reference."""

from __future__ import annotations

import importlib
import re

import pytest

from rose.kernels import build, registry
from rose.kernels.moe_route import cases

registry.load("moe_route")
impl = importlib.import_module("rose.kernels.moe_route.cuda_decode_impl")
needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")


@pytest.fixture(scope="module")
def built() -> build.Built:
    return impl.LIBRARY.build()


@needs_nvcc
def test_weights_stay_in_registers(built):
    assert len(re.findall(r"Used (\d+) registers", built.log)) == 3
    assert set(re.findall(r"(\d+) bytes spill", built.log)) == {"0"}
    assert "warning" not in built.log


@needs_nvcc
def test_weights_load_before_the_wait_for_the_kernel_before(built):
    if build.find_cuobjdump() is None:
        pytest.skip("cuobjdump is not installed")
    for code in re.split(r"\n\s*Function : ", build.disassemble(built.path))[1:]:
        before, after = code.split("ACQBULK", 1)
        assert len(re.findall(r"LDG\S*128", before)) >= 6
        assert "HMMA" in after


@needs_nvcc
def test_both_models_are_taken_and_wider_ones_are_not():
    assert impl._limits(cases.GPT_OSS_20B) is None
    assert impl._limits(cases.GPT_OSS_120B) is None
    assert "3072" in impl._limits({**cases.GPT_OSS_20B, "D": 4096})
    assert "128" in impl._limits({**cases.GPT_OSS_20B, "E": 256})
