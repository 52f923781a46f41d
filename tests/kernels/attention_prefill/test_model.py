"""The CUDA prefill attention as it is written, on a model of a Hopper block (cuda_model/): roles, waits, layouts.

The kernel's own source is compiled for the CPU; assembly, copies and products are the model's. What it cannot see: real
concurrency, the memory model, what ptxas makes of it, speed.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from rose.kernels import build, registry

registry.load("attention_prefill")
from rose.kernels.attention_prefill import cases, cuda_impl  # noqa: E402
from rose.kernels.attention_prefill.reference import reference  # noqa: E402
from rose.kernels.cases import compare, poison  # noqa: E402
from rose.kernels.paged import JUNK  # noqa: E402

FOLDER = cuda_impl.SOURCE.parent
MODEL = Path(__file__).parent.parent / "cuda_model"
pytestmark = pytest.mark.skipif(
    build.find_nvcc() is None or shutil.which("g++") is None, reason="needs nvcc's headers and g++"
)


def sources(folder: Path, edits: tuple[tuple[str, str, str], ...] = ()) -> Path:
    """Put the kernel and the model side by side; return the file to compile. `edits`: (file, old, new)."""
    for path in FOLDER.glob("*.cuh"):
        shutil.copy(path, folder)
    plain = (build.COMMON / name for name in ("blocks.cuh", "ring.cuh", "warp.cuh"))
    for path in (*MODEL.glob("*.cuh"), *plain):
        shutil.copy(path, folder)
    text = cuda_impl.SOURCE.read_text()
    (folder / "main.cpp").write_text(text)
    for name, old, new in edits:
        edited = (folder / name).read_text()
        assert edited.count(old) == 1, old
        (folder / name).write_text(edited.replace(old, new))
    text = (folder / "main.cpp").read_text()
    launch = r"(\w+)\s*<<<(\w+), (\w+::kThreads), ([^,]*?), stream>>>(\(.*?\));\s*return cudaGetLastError\(\);"
    text, count = re.subn(
        launch, r"return model::run([=] { \1\5; }, \2, \3, \4);", text, flags=re.DOTALL
    )
    assert count == 1
    text, count = re.subn(
        r"cudaError_t error = allow_shared\([^;]*;", "cudaError_t error = cudaSuccess;", text
    )
    assert count == 1
    text = re.sub(
        r"template <class Kernel>\ncudaError_t allow_shared.*?\n}\n", "", text, flags=re.DOTALL
    )
    (folder / "main.cpp").write_text('#include "machine.cuh"\n' + text)
    for path in (folder / "main.cpp", *folder.glob("*.cuh")):
        memory = "uint8_t* raw = model::block->shared.data();"
        path.write_text(path.read_text().replace("extern __shared__ uint8_t raw[];", memory))
    return folder / "main.cpp"


def compiled(folder: Path, edits: tuple[tuple[str, str, str], ...] = ()) -> ctypes.CDLL:
    nvcc = build.find_nvcc()
    assert nvcc is not None
    path = folder / "model.so"
    bits = sum(1 << v for v in cuda_impl.VARIANTS)
    options = ["-x", "c++", "-std=c++17", "-O1", "-shared", f"-I{folder}", "-o", str(path)]
    quiet = [f"-DROSE_VARIANTS={bits:#x}", "-Xcompiler", "-fPIC,-w"]
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


ORDER = ("q_THD", "kv_pages", "page_table_SP", "query_starts_S1", "lengths_S", "sinks_H", "out_THD")


def call(library: ctypes.CDLL, variant: int, a: dict[str, Any], num_blocks: int = 2) -> str:
    """Run one call; return what went wrong."""
    packed = cuda_impl.CALL.pack(
        *(a[name].data_ptr() for name in ORDER), 0, a["q_THD"].stride(0), a["kv_pages"].shape[0],
        variant, a["page_table_SP"].stride(0), a["q_THD"].shape[0], a["lengths_S"].numel(),
        a["q_THD"].shape[1], *a["kv_pages"].shape[2:4], a["window_tokens"] or 0, num_blocks, a["scale"],
    )  # fmt: skip
    error = library.launch_attention_prefill(packed)
    return (library.model_problem() or b"").decode() or (f"error {error}" if error else "")


def steps(a: dict[str, Any]) -> None:
    """Older keys are longer, page by page: in each tile scores grow by more than 2^127."""
    pages = a["page_table_SP"]
    for row in pages:
        held = row[row >= 0].long()
        for i, page in enumerate(held):
            a["kv_pages"][page, 0] *= 12 ** (len(held) - 1 - i)


def low(a: dict[str, Any]) -> None:
    """All scores are near -70, and the sink is far below."""
    a["q_THD"].copy_(a["q_THD"] * 0.25 - 3)
    a["kv_pages"][:, 0] = a["kv_pages"][:, 0] * 0.25 + 3
    a["sinks_H"].fill_(-300.0)


CASES = {
    "ragged": ([(1, 1), (63, 63), (64, 69), (65, 193), (3, 140)], None, 64, None),
    "item_and_chunk": ([(200, 450)], None, 128, None),
    "window": ([(70, 300), (130, 130)], 100, 64, None),
    "steps": ([(66, 260)], None, 64, steps),
    "low": ([(66, 200), (10, 10)], None, 64, low),
}


def drawn(name: str) -> tuple[cases.Case, dict[str, Any]]:
    chunks, window, page_tokens, change = CASES[name]
    sizes = {"H": 2, "G": 1, "D": 64, "L": page_tokens}
    case = cases.make_case(name, chunks, sizes, window=window, dtype="bf16", is_strided=True)
    a = cases.inputs(case, 3, "cpu")
    # What was never written may hold anything; values there reach the tensor core.
    a["kv_pages"][a["kv_pages"] == JUNK] = torch.nan
    if change is not None:
        change(a)
    return case, a


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("variant", cuda_impl.VARIANTS)
def test_as_the_formula_says(library: ctypes.CDLL, variant: int, name: str) -> None:
    case, a = drawn(name)
    window = a["window_tokens"]
    if variant == cuda_impl.WINDOW_VARIANT and (window is None or window > cuda_impl.MAX_WINDOW):
        pytest.skip("serves narrow windows only")
    out_THD = a.pop("out_THD")
    wanted = torch.empty(out_THD.shape)
    reference(**{**a, "kv_pages": a["kv_pages"].nan_to_num(0.0)}, out_THD=wanted)
    a["out_THD"] = out_THD
    poison(out_THD)
    assert call(library, variant, a) == ""
    assert compare("out", out_THD.float(), wanted, cases.tolerance(case)) is None


FAULTS = {
    "a maximum is never raised": (
        ("full_softmax.cuh", "!(sum[0] + sum[1] < kTrustedSum)", "false"),
        (38, "steps"),
    ),
    "a tile is never released": (
        (
            "full.cuh",
            "ring.release(ring.tiles - 1);\n      settle(s);",
            "settle(s);",
        ),
        (38, "item_and_chunk"),
    ),
    "an output is stored before it is there": (
        (
            "full.cuh",
            "issue_output(o, packed, ring.value(ring.tiles));\n    wgmma_wait<0>();",
            "issue_output(o, packed, ring.value(ring.tiles));",
        ),
        (38, "item_and_chunk"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_show(tmp_path: Path, fault: str) -> None:
    edit, (variant, name) = FAULTS[fault]
    library = compiled(tmp_path, (edit,))
    case, a = drawn(name)
    wanted = torch.empty(a["out_THD"].shape)
    reference(**{**a, "kv_pages": a["kv_pages"].nan_to_num(0.0), "out_THD": wanted})
    poison(a["out_THD"])
    problem = call(library, variant, a)
    assert problem or compare("out", a["out_THD"].float(), wanted, cases.tolerance(case))
