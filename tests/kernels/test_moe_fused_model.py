"""The fused CUDA experts as they are written, on a model of a Hopper block: roles, waits, layouts (moe_model.py)."""

from __future__ import annotations

import ctypes
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from moe_model import compiled, drawn, launch, poisoned_rows, spread, table_of

from rose.kernels import build
from rose.kernels.moe_experts import cuda_fused
from rose.kernels.moe_experts.mxfp4_tiles import tiled
from rose.kernels.moe_experts.reference import swiglu
from rose.kernels.weights import ExpertWeights
from rose.quant.fp8 import from_mxfp4

pytestmark = pytest.mark.skipif(
    build.find_nvcc() is None or shutil.which("g++") is None, reason="needs nvcc's headers and g++"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("model"), "fused")


def experts(
    library: ctypes.CDLL,
    counts: list[int],
    hidden: int,
    inner: int,
    weight: str,
    block_m: int,
) -> tuple[str, list[Tensor], list[Tensor]]:
    """Run quantise, gate-up and down; return the problem, (x, hidden, y) found and (x, hidden, y) wanted."""
    x_RD, plain = drawn(counts, hidden, inner)
    weights: ExpertWeights = plain
    if weight == "fp8_block":
        weights = ExpertWeights(
            gate_up=from_mxfp4(plain.gate_up), gate_up_bias_EF=plain.gate_up_bias_EF,
            down=from_mxfp4(plain.down), down_bias_ED=plain.down_bias_ED,
        )  # fmt: skip
    up, down, _ = cuda_fused.matrices(tiled(plain) if weight == "mxfp4" else weights)
    table = table_of(counts, block_m)
    rows = x_RD.shape[0]
    values_RD, scales = poisoned_rows(rows, hidden)
    hidden_RI, hidden_scales = poisoned_rows(rows, inner)
    y_RD = torch.full((rows, hidden), torch.nan, dtype=torch.bfloat16)
    problem = launch(
        library, "cuda_fused", "launch_quantize", x_RD.data_ptr(), table.row_TK.data_ptr(), values_RD.data_ptr(),
        scales.data_ptr(), rows, hidden, 1, scales.stride(0),
    ) or launch(
        library, "cuda_fused", "launch_gate_up",
        *cuda_fused._operands(values_RD, scales, table, up, plain.gate_up_bias_EF),
        hidden_RI.data_ptr(), hidden_scales.data_ptr(), hidden_scales.stride(0), 1.702, 7.0, block_m,
    ) or launch(
        library, "cuda_fused", "launch_down",
        *cuda_fused._operands(hidden_RI, hidden_scales, table, down, plain.down_bias_ED),
        y_RD.data_ptr(), block_m,
    )  # fmt: skip
    found = [spread(values_RD, scales), spread(hidden_RI, hidden_scales), y_RD.float()]
    wanted = [x_RD.float(), torch.zeros(rows, inner), torch.zeros(rows, hidden)]
    begin = 0
    for e, count in enumerate(counts):
        part = slice(begin, begin + count)
        gate_up = found[0][part] @ plain.gate_up.to_float()[e].T + plain.gate_up_bias_EF[e].float()
        wanted[1][part] = swiglu(gate_up, alpha=1.702, limit=7.0)
        product = found[1][part] @ plain.down.to_float()[e].T
        wanted[2][part] = product + plain.down_bias_ED[e].float()
        begin += count
    return problem, found, wanted


CASES = [
    ("mxfp4", 256, [70, 0, 200], 192, 192),
    pytest.param("fp8_block", 128, [70, 0, 200], 192, 192, marks=pytest.mark.slow),
    pytest.param("fp8_block", 256, [1, 300], 320, 256, marks=pytest.mark.slow),
    pytest.param("mxfp4", 256, [257, 64, 129], 320, 320, marks=pytest.mark.slow),
    pytest.param("mxfp4", 256, [64, 128, 192], 320, 256, marks=pytest.mark.slow),
    pytest.param("mxfp4", 256, [3, 60], 64, 64, marks=pytest.mark.slow),
    pytest.param("mxfp4", 256, [65, 0, 0, 600], 448, 192, marks=pytest.mark.slow),
    pytest.param("fp8_block", 128, [257, 64, 129], 320, 320, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("weight", "block_m", "counts", "hidden", "inner"), CASES)
def test_experts_agree_with_torch_stage_by_stage(
    library: ctypes.CDLL, weight: str, block_m: int, counts: list[int], hidden: int, inner: int
) -> None:
    problem, found, wanted = experts(library, counts, hidden, inner, weight, block_m)
    assert problem == ""
    # One rounding to E4M3 each for x and hidden (2^-4 of a value at most), to bf16 for y (2^-9).
    for a, b, limit in zip(found, wanted, (4e-2, 4e-2, 4e-3), strict=True):
        assert not torch.isnan(a).any()
        assert (a - b).norm() <= limit * b.norm()
        assert (a - b).abs().max() <= 2 * limit * b.abs().max()


@pytest.mark.slow
def test_a_build_for_racecheck_lets_every_lane_arrive(library: ctypes.CDLL, tmp_path: Path) -> None:
    checked = compiled(tmp_path, "fused", defines=("ROSE_RACECHECK", "ROSE_BLOCKS=1"))
    for weight, block_m in (("mxfp4", 256), ("fp8_block", 128)):
        runs = [
            experts(each, [70, 0, 200], 192, 192, weight, block_m) for each in (checked, library)
        ]
        assert runs[0][0] == ""
        assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_mxfp4_gives_the_bits_of_its_expanded_copy(library: ctypes.CDLL) -> None:
    runs = [experts(library, [100, 30], 192, 192, w, 256)[1] for w in ("mxfp4", "fp8_block")]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "words"), [
    ("fence_proxy_async();", "", "not fenced"),
    ("P::kMxfp4 ? 5 : 1", "P::kMxfp4 ? 6 : 1", "deadlock"),
    ("mbarrier_arrive(at.packed_empty", "// mbarrier_arrive(at.packed_empty", "deadlock"),
    ("mbarrier_wait(at.full + 8 * ring.stage, ring.parity);\n  multiply", "multiply", ""),
    ("chunk1 = chunk0 ^ 16", "chunk1 = chunk0 + 16", ""),
    ("+ (place.row & 3))", ")", ""),
])  # fmt: skip
def test_the_model_notices_mistakes(tmp_path: Path, old: str, new: str, words: str) -> None:
    library = compiled(tmp_path, "fused", ((old, new),))
    problem, found, wanted = experts(library, [70, 0, 200], 448, 192, "mxfp4", 256)
    right = all(
        not torch.isnan(a).any() and (a - b).norm() <= limit * b.norm()
        for a, b, limit in zip(found, wanted, (4e-2, 4e-2, 4e-3), strict=True)
    )
    assert words in problem
    assert problem or not right
