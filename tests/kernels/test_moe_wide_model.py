"""The experts for long steps as they are bound, on a model of a Hopper block: roles, waits, layouts (wide_model.py)."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from moe_model import (
    declared_by,
    drawn,
    is_right,
    launch,
    passed_by,
    table_of,
    with_exponents_far_apart,
)
from wide_model import BOUND, compiled, tools_are_there

from rose.kernels import build, registry
from rose.kernels.aot_reads import late_reads
from rose.kernels.moe_experts import cuda_swapped, cuda_wide
from rose.kernels.moe_experts.reference import swiglu
from rose.kernels.moe_experts.swapped_tables import with_offsets
from rose.kernels.weights import ExpertWeights
from rose.utils.device import DeviceFacts

pytestmark = pytest.mark.skipif(not tools_are_there(), reason="needs nvcc's headers and g++")
LIMITS = (4e-2, 4e-3)
"""One rounding to E4M3 for x (2^-4 of a value at most), to bf16 for the SwiGLU (2^-9)."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("wide"), (BOUND,))


def gate_up(
    library: ctypes.CDLL,
    counts: list[int],
    hidden: int,
    inner: int,
    *,
    weights: ExpertWeights | None = None,
) -> tuple[str, list[Tensor], list[Tensor]]:
    """Run quantise and gate-up; return the problem, (x, SwiGLU) found and (x, SwiGLU) wanted."""
    x_RD, plain = drawn(counts, hidden, inner)
    plain = weights or plain
    made, table, rows = with_offsets(plain), table_of(counts, cuda_wide.ROWS), x_RD.shape[0]
    values_RD = torch.full((rows, hidden), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales_R = torch.full((rows,), torch.nan)
    hidden_RI = torch.full((rows, inner), torch.nan, dtype=torch.bfloat16)
    problem = launch(
        library, "cuda_wide", "launch_quantize_tokens", x_RD.data_ptr(), table.row_TK.data_ptr(),
        values_RD.data_ptr(), scales_R.data_ptr(), rows, hidden, 1,
    ) or launch(
        library, "cuda_wide", "launch_wide_gate_up",
        *cuda_wide.operands(values_RD, scales_R, table, made.gate_up, plain.gate_up_bias_EF),
        hidden_RI.data_ptr(), 1.702, 7.0,
    )  # fmt: skip
    found = [cuda_swapped.in_order(values_RD).float() * scales_R.unsqueeze(1), hidden_RI.float()]
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    wanted_RI = torch.zeros(rows, inner)
    for e in range(len(counts)):
        mine = owner == e
        u_RF = found[0][mine] @ plain.gate_up.to_float()[e].T + plain.gate_up_bias_EF[e].float()
        wanted_RI[mine] = swiglu(u_RF, alpha=1.702, limit=7.0)
    return problem, found, [x_RD.float(), wanted_RI]


@pytest.mark.parametrize(("counts", "hidden", "inner"), [
    ([70, 0, 30], 192, 192),
    pytest.param([145, 257], 192, 320, marks=pytest.mark.slow),
    pytest.param([1, 63, 64, 65], 320, 320, marks=pytest.mark.slow),
    pytest.param([255, 256, 257], 192, 320, marks=pytest.mark.slow),
    pytest.param([3, 60], 64, 64, marks=pytest.mark.slow),
    pytest.param([5, 0, 0, 600], 448, 192, marks=pytest.mark.slow),
])  # fmt: skip
def test_tokens_and_swiglu_agree_with_torch(
    library: ctypes.CDLL, counts: list[int], hidden: int, inner: int
) -> None:
    problem, found, wanted = gate_up(library, counts, hidden, inner)
    assert problem == ""
    for a, b, limit in zip(found, wanted, LIMITS, strict=True):
        assert not torch.isnan(a).any()
        assert (a - b).norm() <= limit * b.norm()
        assert (a - b).abs().max() <= 2 * limit * b.abs().max()


def test_a_number_of_columns_without_a_half_stage_is_refused(library: ctypes.CDLL) -> None:
    problem, _, _ = gate_up(library, [40], 256, 192)
    assert problem == "error 1"


def test_exponents_far_apart_are_expanded_as_far_as_e4m3_goes(library: ctypes.CDLL) -> None:
    problem, found, wanted = gate_up(library, [40], 192, 192, weights=with_exponents_far_apart())
    assert problem == ""
    assert is_right(found, wanted, LIMITS)


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "words"), [
    ("mbarrier_init(at.full + 8 * i, kWarpArrivals)", "mbarrier_init(at.full + 8 * i, 2)", "deadlock"),
    ("if (done != 0 && is_arriving()) mbarrier_arrive(done);", "", "deadlock"),
    ("if (is_arriving()) mbarrier_arrive(at.end_empty + 8 * ends.stage);", "", "deadlock"),
    ("  wgmma_wait<1>();\n", "", ""),
    ("  wgmma_wait<0>();\n  settle(sums);\n", "", ""),
    ("-row_scale * scales[i]", "row_scale * scales[i]", ""),
    ("uint32_t(16 * slab)}", "0}", ""),
    ("? 2 * consumer + warp % 2 : warp;", "? warp : warp;", ""),
    (" + run % 2;", ";", ""),
    ("- (kSteps == 2 ? 8 * (threadIdx.x % 4) : 0)", "", ""),
    ("8 * (4 * (chunk / 2) + 2 * consumer + chunk % 2)", "8 * (2 * consumer + chunk)", ""),
])  # fmt: skip
def test_the_model_notices_mistakes(tmp_path: Path, old: str, new: str, words: str) -> None:
    library = compiled(tmp_path, (BOUND,), ((old, new),), widths="64, 144")
    problem, found, wanted = gate_up(library, [70, 0, 140], 448, 320)
    assert words in problem
    assert problem or not is_right(found, wanted, LIMITS)


def test_python_passes_what_the_launchers_take() -> None:
    assert passed_by("cuda_wide") == declared_by(BOUND)


@pytest.mark.parametrize(("changes", "word"), [
    ({}, None),
    ({"D": 2816}, "D = 2816; takes 128 k + 64"),
    ({"D": 3136}, "up to 3072"),
    ({"E": 64}, "64 experts; made for more than 64"),
    ({"E": 256}, "256 experts; the sort takes up to 128"),
    ({"K": 8}, "8 experts per token; takes up to 4"),
])  # fmt: skip
def test_sizes_that_it_cannot_take_are_refused_with_a_reason(
    changes: dict[str, int], word: str | None
) -> None:
    registry.load("moe_experts")
    known = {i.name: i for i in registry.implementations("moe_experts")}
    reason = known["cuda_wide"].limits({"D": 2880, "I": 2880, "E": 128, "K": 4, **changes})
    assert reason is None if word is None else word in str(reason)


def test_weights_and_tables_are_held_once_for_short_and_long_steps() -> None:
    bound = registry.bind(
        "moe_experts",
        formats={"activation": "bf16", "weight": "mxfp4"},
        sizes={"D": 2880, "I": 2880, "E": 128, "K": 4},
        device=DeviceFacts(kind="cuda", name="NVIDIA H200", capability=(9, 0), num_sms=132),
    )
    prefill = {i.name: i for r, i in bound.table.items() if r.phase == "prefill"}
    assert list(prefill) == ["cuda_swapped", "cuda_wide"]
    assert len({i.prepare for i in prefill.values()}) == 1
    assert bound.table[registry.MANY_DECODE].name == "cuda_swapped"


def test_the_workspace_is_the_most_that_a_stage_reads_and_writes() -> None:
    sizes, rows = {"D": 320, "I": 192, "E": 128, "K": 4}, 16384
    pairs, groups, integers = rows * 4, 2, 3  # row_TK of two tables, rows of the rounding
    down = pairs * (192 + 2 * 320)
    assert cuda_wide.workspace(sizes, rows, 0) == down + 4 * pairs * (groups + integers + 1)
    gate_up = pairs * (320 + 2 * 576)
    assert cuda_wide.workspace({**sizes, "I": 576}, rows, 0) >= gate_up


@pytest.mark.slow
def test_the_product_compiles_with_operand_a_in_registers_without_spills_or_serialised_wgmma() -> (
    None
):
    built = cuda_wide.WideLibrary().library.build()
    assert "warning" not in built.log
    assert "Performance Loss" not in built.log
    assert set(re.findall(r"(\d+) bytes spill", built.log)) == {"0"}
    functions = re.split(r"\n\s*Function : ", build.disassemble(built.path))[1:]
    (code,) = (f for f in functions if "7product" in f.split("\n")[0])
    widths = set(re.findall(r"QGMMA\.64x(\d+)x32\.F32\.E4M3\.E4M3 R\d+, R\d+, gdesc", code))
    assert len(widths) == 14
    # A stage goes back once its reads have arrived. What is pending at named barriers was read from a tile's end,
    # which ordinary stores write and no copy.
    assert all(late.startswith("BAR.SYNC") for late in late_reads(code))
    # Each width has a half stage and two whole ones.
    assert len(re.findall("QGMMA", code)) == (2 + 4 + 4) * len(widths)
