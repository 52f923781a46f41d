"""The unbound experts for many tokens with one scale per token, on a model of a Hopper block (moe_model.py)."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from moe_model import TYPES, drawn, sources, table_of

from rose.kernels import build
from rose.kernels.aot_reads import late_reads
from rose.kernels.formats import MXFP4, FormattedTensor
from rose.kernels.moe_experts import cuda_swapped
from rose.kernels.moe_experts.reference import swiglu
from rose.kernels.weights import ExpertWeights

UNBOUND = Path(__file__).parents[2] / "benchmarks/unbound"
LIMITS = (4e-2, 4e-2, 4e-3)
"""One rounding to E4M3 each for x and hidden (2^-4 of a value at most), to bf16 for y (2^-9)."""
PTX = """#pragma once
#include "tma.cuh"
#include "wgmma_fp8_registers.cuh"
namespace rose::moe::wide {
inline void prefetch_3d(const CUtensorMap* map, int x, int y, int z) {
  ModelMap made;
  std::memcpy(&made, map, sizeof(made));
  const bool is_in = x >= 0 && uint64_t(x) < made.sizes[0] && y >= 0 && uint64_t(y) < made.sizes[1];
  if (!is_in || z != 0) model::fail("no such box");
}
}
"""
"""wide_ptx.cuh on the model."""
KERNELS = "../../src/rose/kernels/moe_experts/"

pytestmark = pytest.mark.skipif(
    build.find_nvcc() is None or shutil.which("g++") is None, reason="needs nvcc's headers and g++"
)


def _module():
    spec = importlib.util.spec_from_file_location("unbound_wide", UNBOUND / "wide.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


wide = _module()


def compiled(
    folder: Path, edits: tuple[tuple[str, str], ...] = (), *, widths: str = "32, 64, 144, 256"
) -> ctypes.CDLL:
    """Compile wide.cuh with the model; few widths, so that it takes seconds."""
    sources(folder, "swapped")
    (folder / "wide_ptx.cuh").write_text(PTX)
    text = (UNBOUND / "wide.cuh").read_text().replace(KERNELS, "")
    launch = r"product<P><<<(.*?), P::kThreads, P::kSharedBytes, stream>>>\(p\);"
    run = r"return model::run([=] { product<P>(p); }, \1, P::kThreads, P::kSharedBytes);"
    text, count = re.subn(launch, run, text, flags=re.DOTALL)
    assert count == 1
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "wide.cuh").write_text(text)
    main = (UNBOUND / "wide_sm90.cu").read_text()
    main, count = re.subn(r"#define ROSE_WIDTHS .*", f"#define ROSE_WIDTHS {widths}", main)
    assert count == 1
    main, count = re.subn(
        r"(wide::quantize_tokens<[^>]+>)<<<(\w+), (\w+), 0, stream>>>(\(.*?\));",
        r"return model::run([=] { \1\4; }, \2, \3, 0);",
        main,
    )
    assert count == 1
    raw = "".join(f"namespace rose::moe::{n} {{ uint8_t raw[1]; }}\n" for n in ("swapped", "wide"))
    (folder / "main.cpp").write_text(
        main.replace('#include "wide.cuh"\n', f'#include "wide.cuh"\n{raw}')
    )
    nvcc = build.find_nvcc()
    assert nvcc is not None
    options = ["-x", "c++", "-std=c++17", "-O1", "-shared", f"-I{folder}", "-Xcompiler", "-fPIC,-w"]
    done = subprocess.run(
        [nvcc, *options, "-o", str(folder / "wide.so"), str(folder / "main.cpp")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    library = ctypes.CDLL(str(folder / "wide.so"))
    library.model_problem.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("wide"))


def launch(library: ctypes.CDLL, name: str, *arguments: object) -> str:
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
    made = wide.prepare(plain, wide.SHAPES[shape])
    table = table_of(counts, wide.SHAPES[shape].rows)
    rows = x_RD.shape[0]
    unit = wide.hidden_scale(7.0)

    def empty(columns: int) -> Tensor:
        return torch.full((rows, columns), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)

    values_RD, hidden_RI = empty(hidden), empty(inner)
    scales_R = torch.full((rows,), torch.nan)
    y_RD = torch.full((rows, hidden), torch.nan, dtype=torch.bfloat16)
    problem = launch(
        library, "launch_quantize_tokens", x_RD.data_ptr(), table.row_TK.data_ptr(),
        values_RD.data_ptr(), scales_R.data_ptr(), rows, hidden, 1,
    ) or launch(
        library, "launch_wide_gate_up",
        *wide.operands(values_RD, scales_R, 0.0, table, made.gate_up, plain.gate_up_bias_EF, wide.SHAPES[shape]),
        0, hidden_RI.data_ptr(), unit, 1.702, 7.0,
    ) or launch(
        library, "launch_wide_down",
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


def is_right(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(
        not torch.isnan(a).any()
        and bool((a - b).norm() <= limit * b.norm())
        and bool((a - b).abs().max() <= 2 * limit * b.abs().max())
        for a, b, limit in zip(found, wanted, LIMITS, strict=True)
    )


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
    for a, b, limit in zip(found, wanted, LIMITS, strict=True):
        assert not torch.isnan(a).any()
        assert (a - b).norm() <= limit * b.norm()
        assert (a - b).abs().max() <= 2 * limit * b.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(("counts", "inner"), [([70, 0, 30], 192), ([145, 257], 320)])
def test_a_swiglu_to_be_rounded_in_groups_leaves_as_bf16_with_its_columns_in_order(
    library: ctypes.CDLL, counts: list[int], inner: int
) -> None:
    shape = wide.SHAPES["wide_groups"]
    x_RD, plain = drawn(counts, 192, inner)
    made, table, rows = wide.prepare(plain, shape), table_of(counts, shape.rows), x_RD.shape[0]
    values_RD, scales_R = torch.empty_like(x_RD, dtype=torch.float8_e4m3fn), torch.empty(rows)
    hidden_RI = torch.full((rows, inner), torch.nan, dtype=torch.bfloat16)
    problem = launch(
        library, "launch_quantize_tokens", x_RD.data_ptr(), table.row_TK.data_ptr(),
        values_RD.data_ptr(), scales_R.data_ptr(), rows, 192, 1,
    ) or launch(
        library, "launch_wide_gate_up",
        *wide.operands(values_RD, scales_R, 0.0, table, made.gate_up, plain.gate_up_bias_EF, shape),
        1, hidden_RI.data_ptr(), 1.0, 1.702, 7.0,
    )  # fmt: skip
    assert problem == ""
    found_RD = cuda_swapped.in_order(values_RD).float() * scales_R.unsqueeze(1)
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    gate_up = torch.einsum("rd,rfd->rf", found_RD, plain.gate_up.to_float()[owner])
    wanted = swiglu(gate_up + plain.gate_up_bias_EF[owner].float(), alpha=1.702, limit=7.0)
    assert (hidden_RI.float() - wanted).abs().max() <= 2**-8 * wanted.abs().max()
    assert (hidden_RI.float() - wanted).norm() <= LIMITS[2] * wanted.norm()


def test_the_rounding_of_the_swiglu_is_one_to_e4m3_in_fixed_units() -> None:
    assert wide.hidden_scale(7.0) == 0.125
    largest = torch.tensor([7.0 * 8.0])  # gate and up at the limit, the sigmoid at one
    assert (largest / wide.hidden_scale(7.0)).to(torch.float8_e4m3fn).float() == 448


def codes_of(rows: int, columns: int, scales: Tensor) -> FormattedTensor:
    codes = torch.randint(0, 256, (1, rows, columns // 32, 16), dtype=torch.uint8)
    return FormattedTensor(format=MXFP4, values=codes, scales=scales.expand(1, rows, columns // 32))


@pytest.mark.slow
def test_exponents_far_apart_are_expanded_as_far_as_e4m3_goes(library: ctypes.CDLL) -> None:
    torch.manual_seed(5)
    spread_out = torch.tensor([120, 107, 119, 100, 118, 60], dtype=torch.uint8)
    weights = ExpertWeights(
        gate_up=codes_of(384, 192, spread_out), gate_up_bias_EF=torch.randn(1, 384).bfloat16(),
        down=codes_of(192, 192, spread_out), down_bias_ED=torch.randn(1, 192).bfloat16(),
    )  # fmt: skip
    problem, found, wanted = experts(library, [40], 192, 192, weights=weights)
    assert problem == ""
    assert is_right(found, wanted)


@pytest.mark.slow
def test_a_number_of_columns_without_a_half_stage_is_refused(library: ctypes.CDLL) -> None:
    problem, _, _ = experts(library, [40], 256, 192)
    assert problem == "error 1"


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "words"), [
    ("mbarrier_init(at.full + 8 * i, kWarpArrivals)", "mbarrier_init(at.full + 8 * i, 2)", "deadlock"),
    ("if (done != 0 && is_arriving()) mbarrier_arrive(done);", "", "deadlock"),
    ("if (is_arriving()) mbarrier_arrive(at.end_empty + 8 * ends.stage);", "", "deadlock"),
    ("  wgmma_wait<1>();\n", "", ""),
    ("  wgmma_wait<0>();\n  settle(sums);\n", "", ""),
    ("-row_scale * scales[i]", "row_scale * scales[i]", ""),
    ("uint32_t(16 * (thread % 2))}", "0}", ""),
    ("- (kSteps == 2 ? 8 * (threadIdx.x % 4) : 0)", "", ""),
    ("16 * (pair / 8) + pair % 8 + 8 * b", "16 * (pair / 8) + pair % 8 + 8 * (1 - b)", ""),
])  # fmt: skip
def test_the_model_notices_mistakes(tmp_path: Path, old: str, new: str, words: str) -> None:
    library = compiled(tmp_path, ((old, new),), widths="64, 144")
    problem, found, wanted = experts(library, [70, 0, 140], 448, 192)
    assert words in problem
    assert problem or not is_right(found, wanted)


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
    print({i.name for r, i in bound.table.items() if r.phase == "prefill"})
"""


@pytest.mark.slow
def test_a_trial_takes_the_place_of_the_bound_experts_where_sizes_allow_it() -> None:
    # In a process of its own: what it registers stays registered.
    root = UNBOUND.parents[1]
    paths = os.pathsep.join((str(root / "src"), str(UNBOUND.parent)))
    done = subprocess.run(
        [sys.executable, "-c", TRIAL], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.stdout.split("\n")[:2] == ["{'cuda_wide'}", "{'cuda_swapped'}"], done.stderr


@pytest.mark.slow
def test_products_compile_with_operand_a_in_registers_without_spills_or_serialised_wgmma() -> None:
    built = wide.WideLibrary().library.build()
    assert "warning" not in built.log
    assert "Performance Loss" not in built.log
    assert set(re.findall(r"(\d+) bytes spill", built.log)) == {"0"}
    functions = re.split(r"\n\s*Function : ", build.disassemble(built.path))[1:]
    products = [f for f in functions if "7product" in f.split("\n")[0]]
    assert len(products) == 5
    for code in products:
        widths = set(re.findall(r"QGMMA\.64x(\d+)x32\.F32\.E4M3\.E4M3 R\d+, R\d+, gdesc", code))
        # A stage goes back once its reads have arrived. What is pending at named barriers was read from a tile's end,
        # which ordinary stores write and no copy.
        assert all(late.startswith("BAR.SYNC") for late in late_reads(code))
        # Each width has a half stage and two whole ones.
        assert len(re.findall("QGMMA", code)) == (2 + 4 + 4) * len(widths)
