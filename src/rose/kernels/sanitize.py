"""Small cases under NVIDIA's compute-sanitizer: accesses outside an allocation, or races in shared memory."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rose.utils.errors import RoseError

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
USUAL = Path("/usr/local/cuda/bin/compute-sanitizer")


def find_sanitizer() -> str:
    """Return the tool on PATH, or the one in CUDA's usual place.

    Raises  RoseError where there is none.
    """
    found = shutil.which("compute-sanitizer") or (str(USUAL) if USUAL.exists() else None)
    if found is None:
        raise RoseError(
            f"sanitize needs compute-sanitizer; found none on PATH and no {USUAL}; it comes with the CUDA toolkit "
            "(package cuda-sanitizer); install it, or run `check`, which compares results only"
        )
    return found


def sanitizer_command(
    checked: Sequence[str], *, toolchain: str, tool: str = "memcheck"
) -> tuple[list[str], dict[str, str]]:
    """Return the command that checks small cases under one of `TOOLS`, and what its environment adds.

    `checked`: more arguments of `check`. The command fails where a result is wrong or the tool reports anything.
    """
    check = ["-m", "rose.kernels", "check", "--device", "cuda", "--small", "--toolchain", toolchain]
    command = [find_sanitizer(), "--tool", tool, "--error-exitcode", "3", sys.executable]
    # Torch's allocator hands out parts of large blocks: what leaves a tensor would stay inside one.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    if tool == "racecheck":
        check += ["--define", "ROSE_RACECHECK"]  # cuda_common/mbarrier.cuh says why
    return [*command, *check, *checked], environment
