"""Experts in FP8 for many tokens: the sort, the Triton kernels in the interpreter, and what they compile to."""

from __future__ import annotations

import re
import subprocess
import tempfile
from types import ModuleType
from typing import Any

import pytest

from fakes.interpreter import interpret
from rose.kernels import registry
from rose.kernels.build import find_cuobjdump

triton = pytest.importorskip("triton")

SORT = """
import torch
from rose.kernels.moe_experts.triton_permute import sort_by_expert
from rose.utils.math import ceil_div

def check(ids, experts, block_m):
    table = sort_by_expert(ids, num_experts=experts, block_m=block_m)
    flat = ids.flatten()
    here = torch.where(flat >= 0)[0]
    order = here[flat[here].argsort(stable=True)]
    rows = torch.full_like(flat, -1)
    rows[order] = torch.arange(len(order), dtype=torch.int32)
    assert torch.equal(table.row_TK.flatten(), rows), "rows are not in stable order"
    counts = torch.bincount(flat[here], minlength=experts)
    tiles = (counts + block_m - 1) // block_m
    zero = torch.zeros(1, dtype=torch.long)
    assert torch.equal(table.starts_E1.long(), torch.cat([zero, counts.cumsum(0)]))
    assert torch.equal(table.tiles_E1.long(), torch.cat([zero, tiles.cumsum(0)]))
    num_tiles = int(tiles.sum())
    assert num_tiles <= table.max_tiles
    owner = torch.arange(experts).repeat_interleave(tiles)
    assert torch.equal(table.expert_M[:num_tiles].long(), owner)

generator = torch.Generator().manual_seed(3)
for tokens, chosen, experts, block_m in [(1, 4, 32, 128), (65, 4, 6, 64), (130, 4, 128, 64)]:
    ids = torch.randint(0, experts, (tokens, chosen), generator=generator, dtype=torch.int32)
    check(ids, experts, block_m)
    check(ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.5, -1), experts, block_m)
    check(torch.full_like(ids, experts - 1), experts, block_m)
check(torch.full((7, 2), -1, dtype=torch.int32), 4, 64)
"""

CAST = """
import torch, triton, triton.language as tl
from rose.kernels.moe_experts.triton_permute import to_e4m3

@triton.jit
def cast(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, to_e4m3(tl.load(x_ptr + i), True).to(tl.float32))

x = torch.cat([torch.randn(2048) * 2.0 ** torch.randint(-5, 8, (2048,)), torch.linspace(-500, 500, 2048)])
y = torch.empty_like(x)
cast[(1,)](x, y, N=4096)
wanted = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
normal = wanted.abs() >= 2.0 ** -6
assert torch.equal(y[normal], wanted[normal])
assert (y[~normal] - wanted[~normal]).abs().max() < 2.0 ** -6
"""

CASES = """
from rose.kernels import registry
from rose.kernels.check import cases_module, check_case
from rose.utils.device import CPU

operation = registry.load("moe_experts")
mine = {i.name: i for i in registry.implementations("moe_experts")}
for case in cases_module("moe_experts").CASES:
    if case.name.startswith("fp8_prefill"):
        outcome = check_case(operation, mine["triton_prefill"], case, CPU, 1, interpret=True)
        assert outcome.status == "ok", outcome
        print(outcome.case)
"""


def test_pairs_are_sorted_stably_with_empty_and_foreign_experts() -> None:
    interpret(SORT)


@pytest.mark.slow
def test_cast_in_the_interpreter_rounds_to_nearest_even_and_clamps() -> None:
    interpret(CAST)


@pytest.mark.slow
def test_experts_agree_with_the_reference_that_rounds_alike() -> None:
    assert len(interpret(CASES).split()) == 5


@pytest.fixture(scope="module")
def grouped() -> ModuleType:
    registry.load("moe_experts")
    from rose.kernels.moe_experts import triton_grouped

    return triton_grouped


def compiled(
    function: Any, types: dict[str, str], constants: dict[str, Any], **options: int
) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {n: "constexpr" if n in constants else types[n] for n in function.arg_names}
    source = ASTSource(function, signature, constants, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def machine_code(kernel: Any) -> str:
    tool = find_cuobjdump()
    if tool is None:
        pytest.skip("cuobjdump is not installed")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run(
            [tool, "-sass", file.name], capture_output=True, text=True, check=True
        )
    return done.stdout


@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_products_compile_to_fp8_tensor_cores_without_spills(
    grouped: ModuleType, part: str
) -> None:
    from rose.kernels.moe_experts.triton_prefill_impl import DEFAULT, X_GROUP

    shape = getattr(DEFAULT, part)
    group = X_GROUP if part == "gate_up" else DEFAULT.hidden_group
    function = getattr(grouped, f"_{part}_kernel")
    types = {n: "*i32" for n in ("starts_ptr", "tiles_ptr", "expert_ptr")}
    types |= {n: "*fp32" for n in ("a_scales_ptr", "w_scales_ptr", "hidden_scales_ptr")}
    types |= {n: "i32" for n in ("num_experts", "a_stride", "hidden_stride")} | {
        "alpha": "fp32",
        "limit": "fp32",
    }
    types |= {"bias_ptr": "*bf16", "y_ptr": "*bf16", "hidden_ptr": "*fp8e4nv"}
    types["a_desc"] = f"tensordesc<fp8e4nv[{shape.block_m},{group}]>"
    types["w_desc"] = f"tensordesc<fp8e4nv[{shape.block_n},{group}]>"
    constants = {"N": 5760 if part == "gate_up" else 2880, "K": 2880, "GROUP": group}
    constants |= {"BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n, "GROUP_M": shape.group_m}
    if part == "gate_up":
        constants["INTERPRETED"] = False
    kernel = compiled(
        function, types, constants, num_warps=shape.num_warps, num_stages=shape.num_stages
    )
    code = machine_code(kernel)
    assert "QGMMA" in code
    assert "UTMALDG" in code
    assert not re.search(r"\b(LDL|STL)\b", code)
    assert kernel.metadata.shared <= 227 * 1024
