"""Compile CUDA C++ sources into shared objects, keep them, and call their launchers through ctypes.

A kernel folder's `cuda_impl.py` makes one `CudaLibrary`; nothing is compiled at import. Launchers are
`extern "C" int launch_...(pointers, numbers, cudaStream_t)` and return a cudaError_t. No torch headers, no
ABI of torch or Python: the same object serves any version of both.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.utils.errors import RoseError
from rose.utils.log import get_logger

_logger = get_logger(__name__)

COMMON = Path(__file__).parent / "cuda_common"
FLAGS = (
    "-O3",
    "--std=c++17",
    "-shared",
    "-Xcompiler",
    "-fPIC,-fno-gnu-unique",
    "-cudart",
    "static",
)
"""No unique symbols: with them the statics of a template are one for all libraries of a process, so that a second
build of a source would believe that its kernels' attributes had been set."""
REPORT_FLAGS = ("-Xptxas", "-v")
SM90A = "90a"
"""Hopper with WGMMA and setmaxnreg; plain "90" rejects both."""

_defines_of_all: list[str] = []

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "q": ctypes.c_int64, "f": ctypes.c_float}


class BuildError(RoseError):
    """nvcc is absent, or it rejected a source."""


class LaunchError(RuntimeError):
    """A launcher returned a CUDA error."""


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled library and what the compiler said about it (registers, spills, warnings)."""

    path: Path
    log: str


def find_nvcc() -> str | None:
    """Return the compiler on PATH, or the one in CUDA's usual place, or None."""
    usual = Path("/usr/local/cuda/bin/nvcc")
    return shutil.which("nvcc") or (str(usual) if usual.exists() else None)


def default_cache() -> Path:
    """Return where compiled kernels are kept unless a `CudaLibrary` is told otherwise."""
    return Path.home() / ".cache" / "rose" / "kernels"


def define_in_all(words: Sequence[str]) -> None:
    """Build every library made from now on with these words, such as ROSE_WATCHDOG: for a process that only checks.

    They are part of a library's key, so that nothing built otherwise is taken.
    """
    _defines_of_all[:] = words


class CudaLibrary:
    """One `.cu` file, compiled on first use and then found by the hash of all that went into it.

    The key covers the source, every header of ours that it includes, the flags and the architecture; not the
    compiler's version, so that an object built elsewhere can be used where nvcc is absent.
    """

    def __init__(
        self,
        source: Path,
        *,
        defines: Sequence[str] = (),
        arch: str = SM90A,
        cache: Path | None = None,
    ) -> None:
        self.source = source
        self.arch = arch
        self.flags = (
            f"-gencode=arch=compute_{arch},code=sm_{arch}",
            *FLAGS,
            *(f"-D{d}" for d in (*defines, *_defines_of_all)),
        )
        self.cache = cache or default_cache()
        self._loaded: ctypes.CDLL | None = None

    def key(self) -> str:
        """Return the hash that names the compiled object."""
        digest = hashlib.sha256("\0".join(self.flags).encode())
        for path in with_headers(self.source):
            digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
        return digest.hexdigest()[:20]

    def path(self) -> Path:
        """Return where the compiled object is or will be."""
        return self.cache / f"{self.source.parent.name}_{self.source.stem}_{self.key()}.so"

    def refusal(self) -> str | None:
        """Say why this library cannot be had here, or None; for an implementation's `limits`."""
        if find_nvcc() is None and not self.path().exists():
            return f"nvcc is not on PATH and {self.source.name} is not in {self.cache}"
        return None

    def build(self) -> Built:
        """Compile unless already compiled; safe when several ranks or threads do it at once.

        Raises  BuildError with the compiler's words.
        """
        path = self.path()
        log = path.with_suffix(".log")
        if path.exists():
            return Built(path, log.read_text() if log.exists() else "")
        nvcc = find_nvcc()
        if nvcc is None:
            raise BuildError(
                f"{self.source} has to be compiled for sm_{self.arch}; found no nvcc on PATH or in "
                f"/usr/local/cuda and no {path.name} in {self.cache}; install the CUDA toolkit (12.8 or newer) "
                "or bind another implementation with kernels.only"
            )
        self.cache.mkdir(parents=True, exist_ok=True)
        with (self.cache / f"{path.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                log.write_text(self._compile(nvcc, path))
        return Built(path, log.read_text())

    def _compile(self, nvcc: str, path: Path) -> str:
        with tempfile.TemporaryDirectory(dir=self.cache) as folder:
            fresh, begin = Path(folder) / path.name, time.perf_counter()
            command = [nvcc, *self.flags, *REPORT_FLAGS, f"-I{COMMON}", "-o", str(fresh)]
            done = subprocess.run(
                [*command, str(self.source)], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise BuildError(f"nvcc rejected {self.source}:\n{done.stderr}{done.stdout}")
            # The rename is atomic: another process sees no object or a whole one.
            fresh.replace(path)
            words = "compiled %s in %.1f s"
            _logger.info(words, self.source.name, time.perf_counter() - begin)
            return done.stderr + done.stdout

    def launcher(self, name: str, types: str) -> Callable[..., None]:
        """Return `extern "C" int name(...)` as a Python function; the library is built and loaded on its first call.

        types   one letter per argument: p pointer or stream, i int32, q int64, f float32
        Raises  (the returned function) BuildError, or LaunchError with CUDA's words
        """
        function = self.number(name, types)

        def call(*arguments: Any) -> None:
            error = function(*arguments)
            if error:
                raise LaunchError(f"{name}: CUDA error {error} ({self._words(error)})")

        return call

    def number(self, name: str, types: str) -> Callable[..., int]:
        """Return `extern "C" int name(...)` whose result is a number and no error, built and loaded likewise."""
        function: Any = None

        def call(*arguments: Any) -> int:
            nonlocal function
            if function is None:
                function = self._function(name, types)
            return function(*arguments)

        return call

    def load(self) -> ctypes.CDLL:
        """Build if needed and load the library."""
        if self._loaded is None:
            self._loaded = ctypes.CDLL(str(self.build().path))
        return self._loaded

    def _function(self, name: str, types: str) -> Any:
        function = getattr(self.load(), name)
        function.argtypes = [_TYPES[t] for t in types]
        function.restype = ctypes.c_int
        return function

    def _words(self, error: int) -> str:
        """Ask the library (`rose_error_words` of cuda_common/launch.cuh) what an error number means."""
        words = getattr(self.load(), "rose_error_words", None)
        if words is None:
            return "no words for it"
        words.restype = ctypes.c_char_p
        return words(error).decode()


def with_headers(source: Path) -> list[Path]:
    """Return a source and the headers that it includes in quotes, directly or not, as the compiler finds them."""
    found = [source.resolve()]
    for path in found:  # grows while it is gone through
        for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
            places = [(folder / name).resolve() for folder in (path.parent, COMMON)]
            header = next((place for place in places if place.exists()), None)
            if header is None:
                raise BuildError(
                    f"{path} includes {name!r}, found neither beside it nor in {COMMON}"
                )
            if header not in found:
                found.append(header)
    return found


def find_cuobjdump() -> str | None:
    """Return cuobjdump from PATH or from inside triton's wheel, or None."""
    found = shutil.which("cuobjdump")
    spec = None if found else importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return found
    bundled = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(bundled) if bundled.exists() else None


def disassemble(path: Path) -> str:
    """Return the machine code (SASS) of a compiled object.

    Raises  BuildError where no cuobjdump is installed.
    """
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        raise BuildError(
            f"cannot disassemble {path}: found no cuobjdump on PATH or in triton; install either"
        )
    done = subprocess.run(
        [cuobjdump, "-sass", str(path)], capture_output=True, text=True, check=True
    )
    return done.stdout
