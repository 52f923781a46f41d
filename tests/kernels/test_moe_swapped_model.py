"""The swapped CUDA experts as they are written, on a model of a Hopper block: roles, waits, layouts (moe_model.py)."""

from __future__ import annotations

import ctypes
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from moe_model import (
    compiled,
    drawn,
    is_right,
    launch,
    poisoned_rows,
    spread,
    table_of,
    with_exponents_far_apart,
)

from rose.kernels import build
from rose.kernels.moe_experts import cuda_swapped
from rose.kernels.moe_experts.reference import swiglu
from rose.kernels.moe_experts.swapped_tables import with_offsets
from rose.kernels.weights import ExpertWeights

pytestmark = pytest.mark.skipif(
    build.find_nvcc() is None or shutil.which("g++") is None, reason="needs nvcc's headers and g++"
)
LIMITS = (4e-2, 4e-2, 4e-3)
"""One rounding to E4M3 each for x and hidden (2^-4 of a value at most), to bf16 for y (2^-9)."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("model"), "swapped")


def experts(
    library: ctypes.CDLL,
    counts: list[int],
    hidden: int,
    inner: int,
    *,
    weights: ExpertWeights | None = None,
) -> tuple[str, list[Tensor], list[Tensor]]:
    """Run quantise, gate-up and down; return the problem, (x, hidden, y) found and (x, hidden, y) wanted."""
    x_RD, plain = drawn(counts, hidden, inner)
    plain = weights or plain
    made = with_offsets(plain)
    table = table_of(counts, cuda_swapped.ROWS)
    rows = x_RD.shape[0]
    values_RD, scales = poisoned_rows(rows, hidden)
    hidden_RI, hidden_scales = poisoned_rows(rows, inner)
    y_RD = torch.full((rows, hidden), torch.nan, dtype=torch.bfloat16)
    problem = launch(
        library, "cuda_swapped", "launch_quantize_turned", x_RD.data_ptr(), table.row_TK.data_ptr(),
        values_RD.data_ptr(), scales.data_ptr(), rows, hidden, 1, scales.stride(0),
    ) or launch(
        library, "cuda_swapped", "launch_swapped_gate_up",
        *cuda_swapped.operands(values_RD, scales, table, made.gate_up, plain.gate_up_bias_EF),
        hidden_RI.data_ptr(), hidden_scales.data_ptr(), hidden_scales.stride(0), 1.702, 7.0,
    ) or launch(
        library, "cuda_swapped", "launch_swapped_down",
        *cuda_swapped.operands(hidden_RI, hidden_scales, table, made.down, plain.down_bias_ED),
        y_RD.data_ptr(),
    )  # fmt: skip
    found = [
        spread(cuda_swapped.in_order(values_RD), scales),
        spread(cuda_swapped.in_order(hidden_RI), hidden_scales),
        y_RD.float(),
    ]
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


@pytest.mark.parametrize(("counts", "hidden", "inner"), [
    ([70, 0, 130], 192, 192),
    pytest.param([1, 63, 64, 65], 320, 320, marks=pytest.mark.slow),
    pytest.param([127, 128, 129], 128, 256, marks=pytest.mark.slow),
    pytest.param([257, 96, 97], 320, 320, marks=pytest.mark.slow),
    pytest.param([3, 60], 64, 64, marks=pytest.mark.slow),
    pytest.param([5, 0, 0, 600], 448, 192, marks=pytest.mark.slow),
    pytest.param([2, 300], 448, 192, marks=pytest.mark.slow),
])  # fmt: skip
def test_experts_agree_with_torch_stage_by_stage(
    library: ctypes.CDLL, counts: list[int], hidden: int, inner: int
) -> None:
    problem, found, wanted = experts(library, counts, hidden, inner)
    assert problem == ""
    for a, b, limit in zip(found, wanted, LIMITS, strict=True):
        assert not torch.isnan(a).any()
        assert (a - b).norm() <= limit * b.norm()
        assert (a - b).abs().max() <= 2 * limit * b.abs().max()


@pytest.mark.slow
def test_a_build_for_racecheck_lets_every_lane_arrive(tmp_path: Path) -> None:
    problem, found, wanted = experts(
        compiled(tmp_path, "swapped", defines=("ROSE_RACECHECK", "ROSE_BLOCKS=1")),
        [70, 0, 130],
        192,
        192,
    )
    assert problem == ""
    assert is_right(found, wanted, LIMITS)


@pytest.mark.slow
def test_exponents_far_apart_are_expanded_as_far_as_e4m3_goes(library: ctypes.CDLL) -> None:
    problem, found, wanted = experts(library, [40], 192, 192, weights=with_exponents_far_apart())
    assert problem == ""
    assert is_right(found, wanted, LIMITS)


@pytest.mark.slow
def test_products_compile_with_operand_a_in_registers_and_no_serialised_wgmma() -> None:
    built = cuda_swapped.SwappedLibrary().library.build()
    assert "warning" not in built.log
    assert "Performance Loss" not in built.log
    functions = re.split(r"\n\s*Function : ", build.disassemble(built.path))[1:]
    products = [f for f in functions if "7product" in f.split("\n")[0]]
    assert len(products) == 2
    for code in products:
        # Three widths of pieces, each with a half stage and a whole one of two slabs and two pieces.
        assert len(
            re.findall(r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3 R\d+, R\d+, gdesc", code)
        ) == 3 * (8 + 16)


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "words"), [
    ("mbarrier_init(at.full + 8 * i, kWarpArrivals)", "mbarrier_init(at.full + 8 * i, 2)", "deadlock"),
    ("if (is_arriving()) mbarrier_arrive_after(empty, read);", "", "deadlock"),
    ("mbarrier_wait(at.staged_full, staged_parity);", "", ""),
    ("+ 2 * permute_bytes(0x40404040u, 0x40404040u, codes);", ";", ""),
    ("(place.row & 3) + 2 * t", "2 * t", ""),
    ("  wgmma_wait<0>();\n  settle(part[0]);\n  settle(part[1]);\n  const uint32_t read",
     "  const uint32_t read", ""),
    ("code_row * kRowCodes + 16 * t", "code_row * kRowCodes + 8 * t", ""),
    ("const uint32_t codes = stage + P::kCodesAt + mine.codes - 8 * t;",
     "const uint32_t codes = stage + P::kCodesAt + mine.codes;", ""),
])  # fmt: skip
def test_the_model_notices_mistakes(tmp_path: Path, old: str, new: str, words: str) -> None:
    library = compiled(tmp_path, "swapped", ((old, new),))
    problem, found, wanted = experts(library, [70, 0, 200], 448, 192)
    assert words in problem
    assert problem or not is_right(found, wanted, LIMITS)
