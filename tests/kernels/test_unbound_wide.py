"""The ways of prefill_wide.cuh that are not bound, on a model of a Hopper block (wide_model.py)."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from moe_model import TYPES, drawn, is_right, launch, table_of, with_exponents_far_apart
from wide_model import BOUND, WAYS, compiled, tools_are_there

from rose.kernels import build
from rose.kernels.aot_reads import late_reads
from rose.kernels.moe_experts import cuda_swapped
from rose.kernels.moe_experts.reference import swiglu
from rose.kernels.moe_experts.swapped_tables import with_offsets
from rose.kernels.weights import ExpertWeights

UNBOUND = Path(__file__).parents[2] / "benchmarks/unbound"
LIMITS = (4e-2, 4e-2, 4e-3)
"""Relative: one rounding to E4M3 each for x and hidden (2^-4 of a value at most), to bf16 for y (2^-9)."""

pytestmark = pytest.mark.skipif(not tools_are_there(), reason="needs nvcc's headers and g++")


def _module():
    spec = importlib.util.spec_from_file_location("unbound_wide", UNBOUND / "wide.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


wide = _module()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("wide"), (BOUND, WAYS))


def launch_way(library: ctypes.CDLL, name: str, *arguments: object) -> str:
    """As moe_model.launch, for what benchmarks/unbound/wide.py declares."""
    declared = re.search(rf'launcher\("{name}", "(\w+)"\)', (UNBOUND / "wide.py").read_text())
    assert declared is not None
    function = getattr(library, name)
    function.argtypes = [TYPES[t] for t in declared.group(1)]
    error = function(*arguments, None)
    return (library.model_problem() or b"").decode() or (f"error {error}" if error else "")


def experts(
    library: ctypes.CDLL,
    counts: list[int],
    hidden: int,
    inner: int,
    *,
    shape: str = "wide",
    weights: ExpertWeights | None = None,
) -> tuple[str, list[Tensor], list[Tensor]]:
    """Run quantise, gate-up and down; return the problem, (x, hidden, y) found and (x, hidden, y) wanted."""
    x_RD, plain = drawn(counts, hidden, inner)
    plain = weights or plain
    made = with_offsets(plain)
    table = table_of(counts, wide.SHAPES[shape].rows)
    rows = x_RD.shape[0]
    unit = wide.hidden_scale(7.0)

    def empty(columns: int) -> Tensor:
        return torch.full((rows, columns), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)

    values_RD, hidden_RI = empty(hidden), empty(inner)
    scales_R = torch.full((rows,), torch.nan)
    y_RD = torch.full((rows, hidden), torch.nan, dtype=torch.bfloat16)
    problem = launch(
        library, "cuda_wide", "launch_quantize_tokens", x_RD.data_ptr(), table.row_TK.data_ptr(),
        values_RD.data_ptr(), scales_R.data_ptr(), rows, hidden, 1,
    ) or launch_way(
        library, "launch_wide_ways_gate_up",
        *wide.operands(values_RD, scales_R, 0.0, table, made.gate_up, plain.gate_up_bias_EF, wide.SHAPES[shape]),
        hidden_RI.data_ptr(), unit, 1.702, 7.0,
    ) or launch_way(
        library, "launch_wide_ways_down",
        *wide.operands(hidden_RI, None, unit, table, made.down, plain.down_bias_ED, wide.SHAPES[shape]),
        y_RD.data_ptr(),
    )  # fmt: skip
    found = [
        cuda_swapped.in_order(values_RD).float() * scales_R.unsqueeze(1),
        cuda_swapped.in_order(hidden_RI).float() * unit,
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


@pytest.mark.parametrize(("counts", "hidden", "inner", "shape"), [
    ([70, 0, 30], 192, 192, "wide"),
    pytest.param([70, 0, 30], 192, 192, "wide_promote", marks=pytest.mark.slow),
    pytest.param([1, 63, 64, 65], 320, 320, "wide_late_500", marks=pytest.mark.slow),
    pytest.param([255, 256, 257], 192, 320, "wide_ahead", marks=pytest.mark.slow),
    pytest.param([145, 0, 290], 320, 192, "wide", marks=pytest.mark.slow),
    pytest.param([127, 128, 129], 448, 320, "wide_promote", marks=pytest.mark.slow),
    pytest.param([3, 60], 64, 64, "wide", marks=pytest.mark.slow),
    pytest.param([3, 60], 64, 64, "wide_promote", marks=pytest.mark.slow),
    pytest.param([5, 0, 0, 600], 448, 192, "wide", marks=pytest.mark.slow),
])  # fmt: skip
def test_experts_agree_with_torch_stage_by_stage(
    library: ctypes.CDLL, counts: list[int], hidden: int, inner: int, shape: str
) -> None:
    problem, found, wanted = experts(library, counts, hidden, inner, shape=shape)
    assert problem == ""
    largest = (5e-2, wide.largest_error(wanted[1], 7.0), 8e-3)
    for a, b, limit, single in zip(found, wanted, LIMITS, largest, strict=True):
        assert not torch.isnan(a).any()
        assert (a - b).norm() <= limit * b.norm()
        assert (a - b).abs().max() <= single * b.abs().max()


ROUNDED_UNITS = torch.arange(1, 4481) / 10
"""Up to 448, all that a SwiGLU can be."""


def _single(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference over the largest number, as the benchmark's `problem` has it."""
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def test_no_rounding_is_further_off_than_the_limit_says_and_one_nearly_is() -> None:
    rounding = []
    for units in ROUNDED_UNITS.split(1):
        wanted = units * wide.hidden_scale(7.0)
        found = units.to(torch.float8_e4m3fn).float() * wide.hidden_scale(7.0)
        limit = wide.largest_error(wanted, 7.0) - wide.BEFORE_ROUNDING
        assert _single(found, wanted) <= limit + 1e-6
        assert 1 / 32 < limit <= 1 / 16
        rounding.append(_single(found, wanted) / limit)
    assert max(rounding) > 0.99
    # What the check refused before: right above a power of two.
    wanted = torch.tensor([[2.12, -0.3]])
    found = (wanted * 8).to(torch.float8_e4m3fn).float() / 8
    assert 5e-2 < _single(found, wanted) < wide.largest_error(wanted, 7.0)


def test_a_flip_to_the_neighbour_stays_within_the_limit() -> None:
    # Halfway between 16 and 18 units; a little error before decides which of them it is.
    wanted = torch.tensor([[17.0]]) / 8
    for off in (0.999, 1.001):
        found = (wanted * off * 8).to(torch.float8_e4m3fn).float() / 8
        assert _single(found, wanted) <= wide.largest_error(wanted, 7.0)
    # Off by more than sums can be: 18.2 becomes 18, and is told from 16.7.
    wanted, found = torch.tensor([[16.7]]) / 8, torch.tensor([[18.0]]) / 8
    assert _single(found, wanted) > wide.largest_error(wanted, 7.0)


PLAN = '#include "prefill_swapped_plan.cuh"'
SCALE = "__float_as_uint(-row_scale * scales[i])"
TOKEN = "const int token = 16 * (pair / 8) + pair % 8 + 8 * b;"
TABLE = "tables + (offsets >> (8 * h) & 255)"
FAULTS = (
    (PLAN, f"{PLAN}\ninline int model_fault = 0;"),
    (SCALE, f"{SCALE[:-1]} * (model_fault == 1 && i == 0 && lane == 3 ? 2.f : 1.f))"),
    (TOKEN, TOKEN.replace("8 * b", "8 * (model_fault == 2 && pair == 2 ? 1 - b : b)")),
    (TABLE, f"{TABLE} + (model_fault == 3 && threadIdx.x == 0 ? 8 : 0)"),
)
"""Chosen by a number: one token's scale twice as large, two tokens' rows swapped, one block of one row of weights."""


@pytest.mark.slow
def test_the_limit_of_a_single_number_sees_a_fault_by_itself(tmp_path: Path) -> None:
    broken = compiled(tmp_path, (BOUND, WAYS), FAULTS)
    fault = ctypes.c_int.in_dll(broken, "model_fault")
    single = {}
    for number in range(4):
        fault.value = number
        problem, found, wanted = experts(broken, [70, 0, 30], 192, 192)
        assert problem == ""
        single[number] = _single(found[1], wanted[1]) / wide.largest_error(wanted[1], 7.0)
    assert single[0] <= 1
    # The relative error sees these as well, in so small a tensor; of 2,880 channels the third would be one, and 2.9e-2
    # of the 4e-2 that are allowed.
    assert all(single[number] > 1.5 for number in (1, 2, 3)), single


def test_the_rounding_of_the_swiglu_is_one_to_e4m3_in_fixed_units() -> None:
    assert wide.hidden_scale(7.0) == 0.125
    largest = torch.tensor([7.0 * 8.0])  # gate and up at the limit, the sigmoid at one
    assert (largest / wide.hidden_scale(7.0)).to(torch.float8_e4m3fn).float() == 448


@pytest.mark.slow
def test_exponents_far_apart_are_expanded_as_far_as_e4m3_goes(library: ctypes.CDLL) -> None:
    problem, found, wanted = experts(library, [40], 192, 192, weights=with_exponents_far_apart())
    assert problem == ""
    assert is_right(found, wanted, LIMITS)


@pytest.mark.slow
def test_a_number_of_columns_without_a_half_stage_is_refused(library: ctypes.CDLL) -> None:
    problem, _, _ = experts(library, [40], 256, 192)
    assert problem == "error 1"


TRIAL = """
import cuda_wide_trial, unbound.wide
from rose.kernels import registry
from rose.utils.device import DeviceFacts
cuda_wide_trial.register_shape(unbound.wide.SHAPES["wide"])
hopper = DeviceFacts(kind="cuda", name="made up", capability=(9, 0))
formats = {"activation": "bf16", "weight": "mxfp4"}
for inner in (2880, 2944):
    sizes = {"D": 2880, "I": inner, "E": 128, "K": 4}
    bound = registry.bind("moe_experts", formats=formats, sizes=sizes, device=hopper)
    print(sorted({i.name for r, i in bound.table.items() if r.phase == "prefill"}))
"""


PARTS = """
import moe_prefill_wide as benchmark
for name in benchmark.WITHOUT:
    texts = benchmark.sources_without(name)
    print(name, "wide_sm90.cu" in texts and "../" not in "".join(texts.values()))
"""


def test_every_part_that_the_benchmark_takes_out_is_in_the_sources_once() -> None:
    root = UNBOUND.parents[1]
    paths = os.pathsep.join((str(root / "src"), str(UNBOUND.parent)))
    done = subprocess.run(
        [sys.executable, "-c", PARTS], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert all(line.endswith(" True") for line in lines)


@pytest.mark.slow
def test_a_trial_takes_the_place_of_the_bound_experts_where_sizes_allow_it() -> None:
    # In a process of its own: what it registers stays registered.
    root = UNBOUND.parents[1]
    paths = os.pathsep.join((str(root / "src"), str(UNBOUND.parent)))
    done = subprocess.run(
        [sys.executable, "-c", TRIAL], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.stdout.split("\n")[:2] == ["['cuda_trial']", "['cuda_swapped', 'cuda_wide']"], (
        done.stderr
    )


@pytest.mark.slow
def test_products_compile_with_operand_a_in_registers_without_spills_or_serialised_wgmma() -> None:
    built = wide.WideLibrary().library.build()
    assert "warning" not in built.log
    assert "Performance Loss" not in built.log
    assert set(re.findall(r"(\d+) bytes spill", built.log)) == {"0"}
    functions = re.split(r"\n\s*Function : ", build.disassemble(built.path))[1:]
    products = [f for f in functions if "7product" in f.split("\n")[0]]
    assert len(products) == 4
    for code in products:
        widths = set(re.findall(r"QGMMA\.64x(\d+)x32\.F32\.E4M3\.E4M3 R\d+, R\d+, gdesc", code))
        # A stage goes back once its reads have arrived. What is pending at named barriers was read from a tile's end,
        # which ordinary stores write and no copy.
        assert all(late.startswith("BAR.SYNC") for late in late_reads(code))
        # Each width has a half stage and two whole ones.
        assert len(re.findall("QGMMA", code)) == (2 + 4 + 4) * len(widths)
