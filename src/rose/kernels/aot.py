"""Compile the shipped GPU kernels for Hopper on a machine without a GPU, and look at the machine code.

What is compiled comes from the implementations themselves: each is called on its timed cases with tensors
that have shapes and no memory, and every Triton or Gluon launch it makes is compiled with the very arguments
it was given, through Triton's own path, so that types, divisibility and constants are those of a real run.
CUDA sources go through nvcc. Results are kept by a hash of the sources and versions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rose.kernels import registry
from rose.kernels.aot_code import Compiled, inspect_cuda, inspect_triton
from rose.kernels.build import CudaLibrary, find_cuobjdump, find_nvcc
from rose.kernels.check import cases_module, is_runnable
from rose.kernels.registry import Implementation
from rose.utils.device import DeviceFacts
from rose.utils.errors import RoseError

ROOT = Path(__file__).parent
H200 = DeviceFacts(kind="cuda", name="NVIDIA H200", capability=(9, 0), num_sms=132)
CAPABILITY = 90
"""Triton appends the `a` of sm_90a itself."""


def default_cache() -> Path:
    """Return where results and Triton's objects are kept unless told otherwise."""
    return Path.home() / ".cache" / "rose" / "aot"


def compile_operation(
    name: str, *, cache: Path, say: Callable[[str], None] = lambda _text: None
) -> list[Compiled]:
    """Compile every GPU kernel of one operation, or return what an earlier run found.

    Raises  RoseError where a tool is missing
    """
    registry.load(name)
    path = cache / f"{name}-{_key(name)}.json"
    if path.exists():
        return [Compiled(**entry) for entry in json.loads(path.read_text())]
    _require_tools(name)
    say(f"{name}: compiling for sm_{CAPABILITY}a")
    found = list(_triton_kernels(name, cache))
    for library in cuda_libraries(name):
        found += inspect_cuda(name, library)
    cache.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps([dataclasses.asdict(c) for c in found], indent=1))
    fresh.replace(path)
    return found


def problems(name: str, compiled: list[Compiled]) -> list[str]:
    """Return what is wrong with an operation's kernels; an empty list is the aim."""
    spills, late = stated(name, "SPILLS"), stated(name, "LATE_READS")
    found = [p for c in compiled for p in c.problems(spills, late)]
    modules = "".join(path.read_text() for path in _folder(name).glob("*.py"))
    found += [
        f"{source.name} of {name} is named by no module of its folder; remove it"
        for source in _folder(name).glob("*.cu")
        if source.name not in modules
    ]
    return found


def stated(name: str, what: str) -> dict[str, tuple[int, str]]:
    """Return kernel name (or a part of it) -> (number, reason), from the `SPILLS` (bytes) or `LATE_READS` of the
    folder's modules."""
    found: dict[str, tuple[int, str]] = {}
    for module_name, module in sorted(sys.modules.items()):
        if module_name.startswith(f"rose.kernels.{name}."):
            found.update(getattr(module, what, {}))
    return found


def cuda_libraries(name: str) -> list[CudaLibrary]:
    """Return the CUDA libraries that the loaded modules of a folder hold, alone or as `.library` of an object.

    A source that no implementation has loaded is still being worked on, and is not among them.
    """
    found: dict[str, CudaLibrary] = {}
    for module_name, module in sorted(sys.modules.items()):
        if not module_name.startswith(f"rose.kernels.{name}."):
            continue
        for value in vars(module).values():
            library = value if isinstance(value, CudaLibrary) else getattr(value, "library", None)
            if isinstance(library, CudaLibrary):
                found[library.key()] = library
    return list(found.values())


def _folder(name: str) -> Path:
    return ROOT / name


def _key(name: str) -> str:
    """Hash what the result depends on: sources of the folder and of the frame, versions of the compilers."""
    files = [*ROOT.glob("*.py"), *(ROOT / "cuda_common").glob("*"), *_folder(name).iterdir()]
    files += ROOT.parent.glob("utils/*.py")
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for package in ("triton", "torch"):
        spec = importlib.util.find_spec(package)
        digest.update(f"\0{package} {_version(package) if spec else None}".encode())
    for path in sorted(p for p in files if p.is_file()):
        digest.update(f"\0{path.relative_to(ROOT.parent)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _version(package: str) -> str:
    from importlib import metadata

    return metadata.version(package)


def _require_tools(name: str) -> None:
    missing = []
    if importlib.util.find_spec("triton") is None:
        missing.append("triton (pip install 'rose-engine[triton]')")
    elif os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        # triton.jit decided at import to interpret: nothing could be compiled in this process.
        missing.append("a process without TRITON_INTERPRET (unset it)")
    if find_cuobjdump() is None:
        missing.append("cuobjdump (in the CUDA toolkit, or in triton's wheel)")
    if list(_folder(name).glob("*.cu")) and find_nvcc() is None:
        missing.append("nvcc (the CUDA toolkit, 12.8 or newer)")
    if missing:
        raise RoseError(f"compiling {name} ahead of time needs {'; '.join(missing)}")


def _triton_kernels(name: str, cache: Path) -> Iterator[Compiled]:
    seen: set[str] = set()
    for implementation in registry.implementations(name):
        if implementation.toolchain not in ("triton", "gluon"):
            continue
        for case in cases_module(name).CASES:
            if not case.timed or is_runnable(implementation, case, H200) is not None:
                continue
            for kernel in launches(implementation, case, cache=cache):
                if kernel.hash not in seen:
                    seen.add(kernel.hash)
                    yield inspect_triton(
                        kernel,
                        operation=name,
                        implementation=implementation.name,
                        case=case.name,
                        folder=cache,
                    )


def launches(implementation: Implementation, case: Any, *, cache: Path) -> list[Any]:
    """Call an implementation on a case without a device; return what its launches compiled to, in order."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    module = cases_module(implementation.operation)
    with FakeTensorMode(allow_non_fake_inputs=True):
        # Drawn as CPU tensors (there is no CUDA generator), then taken for tensors of a device.
        arguments = {k: _on_device(v) for k, v in module.inputs(case, 0, "cpu").items()}
        if implementation.prepare is not None:
            arguments["weights"] = implementation.prepare(arguments["weights"])
        with _recording(cache) as kernels:
            implementation.function(**arguments)
    return kernels


def _on_device(value: Any) -> Any:
    """Return the same shapes and strides on a device that need not exist; dataclasses field by field."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **{k: _on_device(v) for k, v in fields.items()})
    return value


class _NoDriver:
    """What Triton asks of a driver in order to compile."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)


@contextmanager
def _recording(cache: Path) -> Iterator[list[Any]]:
    """Make every launch compile for Hopper and run nothing; yield the list of what was compiled.

    HAZARD: changes Triton for the whole process while it lasts; not for use beside real launches.
    """
    from triton import knobs
    from triton.runtime import driver, jit

    kernels: list[Any] = []
    functions: Any = jit.JITFunction
    launch = functions.run
    active, folder = driver._active, knobs.cache.dir

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del grid, warmup
        args = tuple(map(_pointer, args))
        kwargs = {k: _pointer(v) for k, v in kwargs.items()}
        kernel = launch(function, *args, grid=None, warmup=True, **kwargs)
        kernels.append(kernel)
        return kernel

    stand_in: Any = _NoDriver()
    driver.set_active(stand_in)
    knobs.cache.dir = str(cache / "triton")
    functions.run = compile_only
    try:
        yield kernels
    finally:
        functions.run = launch
        knobs.cache.dir = folder
        driver._active = active


def _pointer(value: Any) -> Any:
    """Replace tensors, which have no address here, by aligned addresses of their dtype.

    torch's allocator aligns to 512 bytes and the shipped shapes slice at multiples of 16.
    """
    from triton.runtime.jit import MockTensor

    if isinstance(value, Tensor):
        return MockTensor(value.dtype, list(value.shape))
    if type(value).__name__ == "TensorDescriptor":
        value.base = MockTensor(value.base.dtype, list(value.base.shape))
    return value
