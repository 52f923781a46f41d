"""prefill_wide.cuh on a model of a Hopper block (moe_model.py): what the tests of its bound and unbound ways share."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from moe_model import FOLDER, MODEL, sources

from rose.kernels import build

BOUND = FOLDER / "prefill_wide_sm90.cu"
WAYS = Path(__file__).parents[2] / "benchmarks/unbound/wide_sm90.cu"


def compiled(
    folder: Path,
    launchers: tuple[Path, ...],
    edits: tuple[tuple[str, str], ...] = (),
    *,
    widths: str = "32, 64, 144, 256",
) -> ctypes.CDLL:
    """Compile launchers with the model; few widths, so that it takes seconds."""
    sources(folder, "swapped")
    rooms = [p for p in FOLDER.glob("prefill_wide*.cuh") if not (MODEL / p.name).exists()]
    texts = {path.name: path.read_text() for path in rooms}
    launch = r"product<P><<<(.*?), P::kThreads, P::kSharedBytes, stream>>>\(p\);"
    run = r"return model::run([=] { product<P>(p); }, \1, P::kThreads, P::kSharedBytes);"
    main_room = "prefill_wide.cuh"
    texts[main_room], count = re.subn(launch, run, texts[main_room], flags=re.DOTALL)
    assert count == 1
    for old, new in edits:
        assert sum(text.count(old) for text in texts.values()) == 1, old
        texts = {room: text.replace(old, new) for room, text in texts.items()}
    for room, text in texts.items():
        (folder / room).write_text(text)
    main = "".join(path.read_text() for path in launchers)
    main = re.sub(r"#define ROSE_WIDTHS .*|#include .*", "", main)
    main = re.sub(
        r"(wide::quantize_tokens<[^>]+>)<<<(\w+), (\w+), 0, stream>>>(\(.*?\));",
        r"return model::run([=] { \1\4; }, \2, \3, 0);",
        main,
    )
    raw = "".join(f"namespace rose::moe::{n} {{ uint8_t raw[1]; }}\n" for n in ("swapped", "wide"))
    head = f'#define ROSE_WIDTHS {widths}\n#include "prefill_wide.cuh"\n#include "prefill_wide_rows.cuh"\n'
    (folder / "main.cpp").write_text(head + raw + main)
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


def tools_are_there() -> bool:
    return build.find_nvcc() is not None and shutil.which("g++") is not None
