"""KV in E4M3: what is written is the nearest number or the largest; what is read counts in fp16 exactly."""

from __future__ import annotations

import pytest
import torch

from fakes.interpreter import interpret
from rose.kernels import registry
from rose.kernels.rope_kv_write.reference import reference
from rose.utils.device import DeviceFacts

WRITE = """
import numpy as np, torch, triton.language as tl
from triton.runtime import interpreter
from rose.kernels import registry
from rose.kernels.check import cases_module, check_case
from rose.utils.device import CPU

plain = interpreter._convert_float

def convert(x, source, target, rounding):
    # The interpreter's casts to E4M3 lose carries; torch's are what a GPU does: to nearest even.
    if target != tl.float8e4nv:
        return plain(x, source, target, rounding)
    assert source == tl.float32, source
    numbers = torch.from_numpy(np.ascontiguousarray(x))
    assert not (numbers.abs() > 448).any(), "the kernel has to clamp"
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

interpreter._convert_float = convert
operation = registry.load("rope_kv_write")
[kernel] = [i for i in registry.implementations("rope_kv_write") if i.name == "triton_fp8_kv"]
object.__setattr__(kernel, "interpreted", frozenset({"float32"}))
cases = [c for c in cases_module("rope_kv_write").CASES if c.formats["kv"] == "fp8_e4m3" and not c.large]
found = [check_case(operation, kernel, case, CPU, 3, interpret=True) for case in cases]
assert [o.detail for o in found if o.status == "failed"] == []
print(sum(o.status == "ok" for o in found))
"""


def test_the_kernel_writes_what_the_reference_writes() -> None:
    pytest.importorskip("triton")
    assert int(interpret(WRITE)) == 4


def test_what_is_too_large_becomes_the_largest_and_nan_stays() -> None:
    numbers = [449.0, -1e30, float("inf"), 447.0, 2.0**-9, 1.0625, 1.1875, float("nan")]
    qkv_TF = torch.tensor([0.0] * 8 + numbers + numbers).unsqueeze(0)
    cos_sin_PD = torch.tensor([[1.0] * 4 + [0.0] * 4])
    kv_pages = torch.zeros(1, 2, 1, 16, 8).to(torch.float8_e4m3fn)
    first = torch.zeros(1, dtype=torch.int64)
    reference(qkv_TF, first, cos_sin_PD, first + 5, kv_pages=kv_pages)
    value = kv_pages[0, 1, 0, 5].float()
    # Ties go to the even number: 1.0625 lies between 1 and 1.125, 1.1875 between 1.125 and 1.25.
    assert value[:7].tolist() == [448.0, -448.0, 448.0, 448.0, 2.0**-9, 1.0, 1.25]
    assert value[7].isnan()


@pytest.mark.parametrize("name", ["rope_kv_write", "attention_prefill", "attention_decode"])
@pytest.mark.parametrize(
    ("capability", "wanted"),
    [((9, 0), "triton_fp8_kv"), ((8, 9), "triton_fp8_kv"), ((8, 0), "torch")],
)
def test_which_kernel_is_bound_for_pages_in_e4m3(
    name: str, capability: tuple[int, int], wanted: str
) -> None:
    pytest.importorskip("triton")
    bound = registry.bind(
        name,
        formats={"activation": "bf16", "kv": "fp8_e4m3"},
        sizes={"H": 64, "G": 8, "D": 64, "L": 64},
        device=DeviceFacts(kind="cuda", name="a GPU", capability=capability, num_sms=100),
    )
    assert {row.implementation for row in bound.rows()} == {wanted}
