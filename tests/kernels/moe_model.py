"""The experts for many tokens as they are written, on a model of a Hopper block (cuda_model/): what their tests share.

The kernel's own source is compiled for the CPU; assembly and copies are the model's. What it cannot see: real
concurrency, the memory model, speed.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from rose.kernels import build
from rose.kernels.formats import MXFP4, FormattedTensor
from rose.kernels.moe_experts import cuda_fused
from rose.kernels.moe_experts.rows import RowTable, max_tiles
from rose.kernels.weights import ExpertWeights

FOLDER = Path(cuda_fused.__file__).parent
MODEL = Path(__file__).parent / "cuda_model"
PLAIN = tuple(build.COMMON / name for name in ("blocks.cuh", "ring.cuh", "warp.cuh"))
"""Headers that the model takes as they are."""
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}
QUANTIZE = r"template <int kChosenMax[^\n]*\n__global__ void quantize_wide.*?\n}\n"
"""Of prefill_rows.cuh, whose other kernels the model cannot run."""


def sources(folder: Path, name: str, edits: tuple[tuple[str, str], ...] = ()) -> Path:
    """Put the kernel `prefill_<name>.cuh` and the model side by side; return the file to compile."""
    for path in (*MODEL.glob("*.cuh"), *PLAIN, FOLDER / "prefill_tiles.cuh"):
        shutil.copy(path, folder)
    found = re.search(QUANTIZE, (FOLDER / "prefill_rows.cuh").read_text(), re.DOTALL)
    assert found is not None
    (folder / "prefill_rows.cuh").write_text(f"namespace rose::moe {{\n{found.group()}}}\n")
    (folder / "prefill_permute.cuh").write_text("#pragma once\n")
    launch = r"product<P><<<(.*?), P::kThreads, P::kSharedBytes, stream>>>\(p\);"
    run = r"return model::run([=] { product<P>(p); }, \1, P::kThreads, P::kSharedBytes);"
    rooms = [p for p in FOLDER.glob(f"prefill_{name}*.cuh") if not (MODEL / p.name).exists()]
    texts = {path.name: path.read_text() for path in rooms}
    main_room = f"prefill_{name}.cuh"
    texts[main_room], count = re.subn(launch, run, texts[main_room], flags=re.DOTALL)
    assert count == 1
    for old, new in edits:
        assert sum(text.count(old) for text in texts.values()) == 1, old
        texts = {room: text.replace(old, new) for room, text in texts.items()}
    for room, text in texts.items():
        (folder / room).write_text(text)
    launchers = (FOLDER / f"prefill_{name}_sm90.cu").read_text()
    quantize = re.search(r'extern "C" int launch_quantize.*?\n}\n', launchers, re.DOTALL)
    assert quantize is not None
    wide = re.sub(
        r"(quantize_wide<[^>]+>)<<<(\w+), (\w+), 0, stream>>>(\(.*?\));",
        r"return model::run([=] { \1\4; }, \2, \3, 0);",
        quantize.group(),
    )
    main = folder / "main.cpp"
    main.write_text(
        f'#include "prefill_{name}.cuh"\n#include "prefill_rows.cuh"\n'
        f"namespace rose::moe::{name} {{ uint8_t raw[1]; }}\nusing namespace rose::moe;\n"
        + wide
        + launchers[launchers.index("namespace {") :]
    )
    return main


def compiled(
    folder: Path,
    name: str,
    edits: tuple[tuple[str, str], ...] = (),
    *,
    defines: tuple[str, ...] = (),
) -> ctypes.CDLL:
    nvcc = build.find_nvcc()
    assert nvcc is not None
    path = folder / "model.so"
    options = ["-x", "c++", "-std=c++17", "-O1", "-shared", f"-I{folder}", "-o", str(path)]
    options += [f"-D{d}" for d in defines]
    quiet = ["-Xcompiler", "-fPIC,-w"]
    done = subprocess.run(
        [nvcc, *options, *quiet, str(sources(folder, name, edits))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    library = ctypes.CDLL(str(path))
    library.model_problem.restype = ctypes.c_char_p
    return library


def launch(library: ctypes.CDLL, module: str, name: str, *arguments: object) -> str:
    """Call a launcher with the types that `module` (cuda_fused, cuda_swapped) declares; return what went wrong."""
    text = (FOLDER / f"{module}.py").read_text()
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
        block_m=block_m,
    )


def poisoned_rows(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Room for quantised rows as `cuda_fused.quantised_rows` gives it; what no kernel writes is NaN."""
    values_RC, scales = cuda_fused.quantised_rows(torch.empty(0), rows, columns)
    return values_RC.fill_(torch.nan), scales.fill_(torch.nan)


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


def codes_of(rows: int, columns: int, scales: Tensor) -> FormattedTensor:
    """Random codes of one expert; scales: exponents of a row's blocks."""
    codes = torch.randint(0, 256, (1, rows, columns // 32, 16), dtype=torch.uint8)
    return FormattedTensor(format=MXFP4, values=codes, scales=scales.expand(1, rows, columns // 32))


def with_exponents_far_apart() -> ExpertWeights:
    """One expert of 192 columns, some of whose exponents E4M3 cannot reach."""
    torch.manual_seed(5)
    spread_out = torch.tensor([120, 107, 119, 100, 118, 60], dtype=torch.uint8)
    return ExpertWeights(
        gate_up=codes_of(384, 192, spread_out), gate_up_bias_EF=torch.randn(1, 384).bfloat16(),
        down=codes_of(192, 192, spread_out), down_bias_ED=torch.randn(1, 192).bfloat16(),
    )  # fmt: skip


def is_right(found: list[Tensor], wanted: list[Tensor], limits: tuple[float, ...]) -> bool:
    """Say whether each stage is within its limit in the norm, and twice that at its worst number."""
    return all(
        not torch.isnan(a).any()
        and bool((a - b).norm() <= limit * b.norm())
        and bool((a - b).abs().max() <= 2 * limit * b.abs().max())
        for a, b, limit in zip(found, wanted, limits, strict=True)
    )


def declared_by(source: Path) -> dict[str, str]:
    """Return the launchers of a source and the letters of their parameters, the stream's last."""
    declared = {}
    for name, parameters in re.findall(
        r'extern "C" int (launch_\w+)\((.*?)\) \{', source.read_text(), re.DOTALL
    ):
        letters = ""
        for parameter in parameters.split(","):
            words = parameter.split()
            is_pointer = "*" in parameter or words[0] == "cudaStream_t"
            letters += "p" if is_pointer else {"int": "i", "float": "f", "int64_t": "q"}[words[0]]
        declared[name] = letters
    return declared


def passed_by(module: str) -> dict[str, str]:
    """Return the launchers that a module names, and the letters that it declares."""
    text = (FOLDER / f"{module}.py").read_text()
    return dict(re.findall(r'launcher\("(launch_\w+)", "(\w+)"\)', text))
