"""The fused CUDA experts as they are written, on a model of a Hopper block (cuda_model/): roles, waits, layouts.

The kernel's own source is compiled for the CPU; assembly and copies are the model's. What it cannot see: real
concurrency, the memory model, speed.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rose.kernels import build
from rose.kernels.formats import MXFP4, FormattedTensor
from rose.kernels.moe_experts import cuda_fused
from rose.kernels.moe_experts.mxfp4_tiles import tiled
from rose.kernels.moe_experts.reference import swiglu
from rose.kernels.moe_experts.rows import RowTable, max_tiles
from rose.kernels.weights import ExpertWeights
from rose.quant.fp8 import from_mxfp4
from rose.utils.math import ceil_div, round_up

FOLDER = Path(cuda_fused.__file__).parent
MODEL = Path(__file__).parent / "cuda_model"
pytestmark = pytest.mark.skipif(
    build.find_nvcc() is None or shutil.which("g++") is None, reason="needs nvcc's headers and g++"
)
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}
KEPT = {
    "prefill_tiles.cuh": [
        r"constexpr int kTileRows.*?(?=struct Rows)",
        r"struct Rows .*?\n};\n",
        r"template <int kStages>\nstruct Ring .*?\n};\n",
        r"[^\n]*void transpose_quad.*?\n}\n",
        r"[^\n]*uint4 transpose_bytes.*?\n}\n",
    ],
    "prefill_rows.cuh": [r"template <int kChosenMax>\n__global__ void quantize_wide.*?\n}\n"],
}
"""What the fused kernel takes from files whose other kernels the model cannot run."""


def sources(folder: Path, edits: tuple[tuple[str, str], ...] = ()) -> Path:
    """Put the kernel and the model side by side; return the file to compile."""
    for path in MODEL.glob("*.cuh"):
        shutil.copy(path, folder)
    for name, patterns in KEPT.items():
        text = (FOLDER / name).read_text()
        parts = []
        for pattern in patterns:
            found = re.search(pattern, text, re.DOTALL)
            assert found is not None, pattern
            parts.append(found.group())
        includes = "".join(f'#include "{n}.cuh"\n' for n in ("launch", "tma", "prefill_ptx"))
        body = "\n".join(parts)
        (folder / name).write_text(f"#pragma once\n{includes}namespace rose::moe {{\n{body}}}\n")
    (folder / "prefill_permute.cuh").write_text("#pragma once\n")
    text = (FOLDER / "prefill_fused.cuh").read_text()
    launch = r"product<P><<<(.*?), P::kThreads, P::kSharedBytes, stream>>>\(p\);"
    run = r"return model::run([=] { product<P>(p); }, \1, P::kThreads, P::kSharedBytes);"
    text, count = re.subn(launch, run, text, flags=re.DOTALL)
    assert count == 1
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "prefill_fused.cuh").write_text(text)
    launchers = (FOLDER / "prefill_fused_sm90.cu").read_text()
    quantize = re.search(r'extern "C" int launch_quantize.*?\n}\n', launchers, re.DOTALL)
    assert quantize is not None
    wide = re.sub(
        r"(quantize_wide<\d>)<<<(\w+), (\w+), 0, stream>>>(\(.*?\));",
        r"return model::run([=] { \1\4; }, \2, \3, 0);",
        quantize.group(),
    )
    main = folder / "main.cpp"
    main.write_text(
        '#include "prefill_fused.cuh"\n#include "prefill_rows.cuh"\n'
        "namespace rose::moe::fused { uint8_t raw[1]; }\nusing namespace rose::moe;\n"
        + wide
        + launchers[launchers.index("namespace {") :]
    )
    return main


def compiled(folder: Path, edits: tuple[tuple[str, str], ...] = ()) -> ctypes.CDLL:
    nvcc = build.find_nvcc()
    assert nvcc is not None
    path = folder / "model.so"
    options = ["-x", "c++", "-std=c++17", "-O1", "-shared", f"-I{folder}", "-o", str(path)]
    quiet = ["-Xcompiler", "-fPIC,-w"]
    done = subprocess.run(
        [nvcc, *options, *quiet, str(sources(folder, edits))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    library = ctypes.CDLL(str(path))
    library.model_problem.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("model"))


def launch(library: ctypes.CDLL, name: str, *arguments: object) -> str:
    """Call a launcher with the types cuda_fused.py declares; return what went wrong."""
    text = (FOLDER / "cuda_fused.py").read_text()
    declared = re.search(rf'launcher\("{name}", "(\w+)"\)', text)
    assert declared is not None
    function = getattr(library, name)
    function.argtypes = [TYPES[t] for t in declared.group(1)]
    error = function(*arguments, None)
    return (library.model_problem() or b"").decode() or (f"error {error}" if error else "")


def table_of(counts: list[int], block_m: int) -> RowTable:
    """What the sort would leave for rows in the order of their experts."""
    rows = torch.tensor(counts)
    tiles = (rows + block_m - 1) // block_m
    zero = torch.zeros(1, dtype=torch.long)
    total = int(rows.sum())
    expert_M = torch.full((max_tiles(total, len(counts), block_m),), -7, dtype=torch.int32)
    owner = torch.arange(len(counts)).repeat_interleave(tiles).int()
    expert_M[: len(owner)] = owner
    return RowTable(
        row_TK=torch.arange(total, dtype=torch.int32).unsqueeze(1),
        starts_E1=torch.cat([zero, rows.cumsum(0)]).int(),
        tiles_E1=torch.cat([zero, tiles.cumsum(0)]).int(),
        expert_M=expert_M,
        pairs_E1=torch.cat([zero, (tiles // 2).cumsum(0)]).int(),
        block_m=block_m,
    )


def spread(values_RC: Tensor, scales: Tensor) -> Tensor:
    rows, columns = values_RC.shape
    return values_RC.float() * scales[:, :rows].T.repeat_interleave(128, dim=1)[:, :columns]


def drawn(counts: list[int], hidden: int, inner: int) -> tuple[Tensor, ExpertWeights]:
    generator = torch.Generator().manual_seed(sum(counts))
    experts = len(counts)

    def matrix(rows: int, columns: int) -> FormattedTensor:
        shape = (experts, rows, columns // 32)
        codes = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(115, 124, shape, generator=generator, dtype=torch.uint8)
        return FormattedTensor(format=MXFP4, values=codes, scales=scales)

    weights = ExpertWeights(
        gate_up=matrix(2 * inner, hidden),
        gate_up_bias_EF=torch.randn(experts, 2 * inner, generator=generator).bfloat16(),
        down=matrix(hidden, inner),
        down_bias_ED=torch.randn(experts, hidden, generator=generator).bfloat16(),
    )
    return torch.randn(sum(counts), hidden, generator=generator).bfloat16(), weights


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
    rows, padded = x_RD.shape[0], round_up(x_RD.shape[0], 4)

    def empty(columns: int) -> tuple[Tensor, Tensor]:
        values = torch.full((rows, columns), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return values, torch.full((ceil_div(columns, 128), padded), torch.nan)

    values_RD, scales = empty(hidden)
    hidden_RI, hidden_scales = empty(inner)
    y_RD = torch.full((rows, hidden), torch.nan, dtype=torch.bfloat16)
    problem = launch(
        library, "launch_quantize", x_RD.data_ptr(), table.row_TK.data_ptr(), values_RD.data_ptr(),
        scales.data_ptr(), rows, hidden, 1, padded,
    ) or launch(
        library, "launch_gate_up",
        *cuda_fused._operands(values_RD, scales, table, up, plain.gate_up_bias_EF),
        hidden_RI.data_ptr(), hidden_scales.data_ptr(), padded, 1.702, 7.0, block_m, 0,
    ) or launch(
        library, "launch_down",
        *cuda_fused._operands(hidden_RI, hidden_scales, table, down, plain.down_bias_ED),
        y_RD.data_ptr(), block_m, 0,
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
    library = compiled(tmp_path, ((old, new),))
    problem, found, wanted = experts(library, [70, 0, 200], 448, 192, "mxfp4", 256)
    right = all(
        not torch.isnan(a).any() and (a - b).norm() <= limit * b.norm()
        for a, b, limit in zip(found, wanted, (4e-2, 4e-2, 4e-3), strict=True)
    )
    assert words in problem
    assert problem or not right
