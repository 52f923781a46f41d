"""The CUDA sort of the experts on threads of a CPU: the kernel's own source, a cluster of two small blocks."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rose.kernels.moe_experts import cuda_fused
from rose.kernels.moe_experts.rows import allocate_rows

SOURCE = Path(cuda_fused.__file__).with_name("prefill_rows.cuh")
HERE = Path(__file__).parent
UNWRITTEN = -7


def kernel() -> str:
    """Return the kernel with its shared arrays in a `Space`, and fewer warps."""
    found = re.search(r"__global__ void __cluster_dims__.*?\n}\n", SOURCE.read_text(), re.DOTALL)
    assert found is not None
    shared = re.findall(r"__shared__ int (.*?);\n", found.group())
    names = re.findall(r"(\w+)(?:\[[^\]]*\])+", ", ".join(shared))
    assert names == ["next", "counts", "before", "firsts", "tile_starts"]
    body = re.sub(r" *__shared__[^\n]*\n", "", found.group())
    return (
        "constexpr int kSortBlocks = 2, kSortWarps = 4, kMaxExperts = 128;\n"
        f"struct Space {{ int {', '.join(shared)}; }};\n"
        + body.replace(") {\n", f") {{\n  auto& [{', '.join(names)}] = *space;\n", 1)
    )


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("sort_host")
    for path in (HERE / "decode_host/launch.cuh", HERE / "sort_host/host.cpp"):
        shutil.copy(path, folder)
    (folder / "sort.cuh").write_text(kernel())
    command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", "-w"]
    done = subprocess.run(
        [*command, "-o", str(folder / "host.so"), str(folder / "host.cpp")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    function = ctypes.CDLL(str(folder / "host.so")).launch_sort
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 3, *[ctypes.c_void_p] * 5]
    return function


@pytest.mark.parametrize(
    ("tokens", "chosen", "experts", "block_m", "foreign"),
    [(1, 4, 32, 128, 0.0), (200, 2, 5, 16, 0.4), (150, 4, 128, 4, 0.1), (90, 3, 127, 256, 1.0)],
    ids=["one_token", "few_experts", "all_128_experts", "none_is_here"],
)
def test_rows_and_tiles_are_those_of_a_stable_sort(
    launch: Callable[..., int], tokens: int, chosen: int, experts: int, block_m: int, foreign: float
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    # Squared: low experts have many rows, high ones few or none.
    ids = (torch.rand(tokens, chosen, generator=generator) ** 2 * experts).int()
    ids[torch.rand(tokens, chosen, generator=generator) < foreign] = -1
    table = allocate_rows(ids, num_experts=experts, block_m=block_m)
    outputs = (table.row_TK, table.starts_E1, table.tiles_E1, table.expert_M)
    for out in outputs:
        out.fill_(UNWRITTEN)
    launch(
        ids.data_ptr(), ids.numel(), experts, block_m, *(out.data_ptr() for out in outputs), None
    )
    flat = ids.flatten()
    here = torch.where(flat >= 0)[0]
    order = here[flat[here].argsort(stable=True)]
    rows = torch.full_like(flat, -1)
    rows[order] = torch.arange(len(order), dtype=torch.int32)
    counts = torch.bincount(flat[here], minlength=experts)
    tiles = (counts + block_m - 1) // block_m
    owners = torch.arange(experts).repeat_interleave(tiles).tolist()
    assert table.row_TK.flatten().tolist() == rows.tolist()
    assert table.starts_E1.tolist() == [0, *counts.cumsum(0).tolist()]
    assert table.tiles_E1.tolist() == [0, *tiles.cumsum(0).tolist()]
    rest = [UNWRITTEN] * (table.max_tiles - len(owners))
    assert table.expert_M.tolist() == [*owners, *rest]
