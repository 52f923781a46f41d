"""Make the Triton kernels of a start ready before their first launch: several at once, while weights are read.

Triton compiles a kernel in its first launch, so a start with nothing cached compiled one after the other. What starts
launch is listed in ahead.json by configuration, in the order of first launches, as the arguments that Triton tells
kernels apart by. `tools/kernel_lists.py` writes it without a GPU, from the code that decides launches, and
tests/runtime/test_kernels_at_hand.py holds it to that code. Calling Triton's `warmup` with such arguments compiles a
kernel, or reads it from Triton's cache, and leaves it where its launch looks for it. A list can cost time, never more:
what it lacks is compiled by its launch as before, what is no longer launched is compiled in vain, and what fails is
logged and comes up again where it is launched, with the whole error.

Threads of this process, not processes: MLIR, LLVM, ptxas and the C compiler of launchers work without the
interpreter's lock, which a compilation holds for a quarter of its time (sampled on a CPU, 47 kernels); and what a
thread has compiled is there, loaded. Threads begin nothing more once the main thread has ended, and Python waits for
what they are at, which takes under a second each.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rose.kernels import registry
from rose.utils.errors import RoseError
from rose.utils.log import get_logger

_logger = get_logger(__name__)
_PACKAGE = "rose.kernels"
FILE = Path(__file__).with_name("ahead.json")
MOST_THREADS = 6
"""A guess, not timed: with a quarter of the time under the interpreter's lock, four at most are busy on average."""
WAIT_SECONDS = 0.5
"""Between two words about what is being waited for."""

Facts = Mapping[str, str | int]
"""What a list was made for: sizes of the model, formats."""

_TYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8e4nv": torch.float8_e4m3fn,
    "i1": torch.bool,
    "i8": torch.int8,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}
"""Triton's names of what pointers point to."""
_ALIGNED = 16
"""Bytes; also what integers divide by that Triton has kernels of their own for."""
_UNALIGNED = 8
_LONG = 1 << 40


class ListError(RoseError):
    """A launch cannot be listed, or a listed kernel does not exist as it is listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One kernel as a launch specialises it."""

    kernel: str
    """Module below `rose.kernels`, and name."""
    arguments: tuple[Any, ...]
    """In the order of its parameters: "*bf16:16" is a pointer to bf16 at a multiple of 16 bytes, everything else stands
    for itself, or for all numbers that have the same kernel."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of the launch."""

    @classmethod
    def of(
        cls, function: Any, specialization: Sequence[tuple[str, Any]], options: Mapping[str, Any]
    ) -> Listed:
        """Return how a launch is listed, from what Triton makes of its arguments.

        Raises  ListError for types that no launch has had yet
        """
        name = f"{function.fn.__module__.removeprefix(_PACKAGE + '.')}.{function.fn.__name__}"
        return cls(
            kernel=name,
            arguments=tuple(_listed(name, kind, value) for kind, value in specialization),
            options=tuple(options.items()),
        )

    def find(self) -> Any:
        """Import the kernel.

        Raises  ListError where it is not there, or takes other parameters
        """
        module, _, name = self.kernel.rpartition(".")
        try:
            # What an implementation's file registers itself with.
            registry.load(module.partition(".")[0])
            function = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
        except (ImportError, AttributeError, RoseError) as error:
            raise ListError(f"{self.kernel}: {error}") from error
        if len(function.params) != len(self.arguments):
            found, needed = len(self.arguments), len(function.params)
            raise ListError(f"{self.kernel}: {found} arguments are listed, it takes {needed}")
        return function

    def make(self, function: Any) -> Any:
        """Return the compiled kernel, from Triton's cache or anew."""
        arguments = map(_argument, self.arguments)
        return function.warmup(*arguments, grid=(1,), **dict(self.options))


def _listed(kernel: str, kind: str, value: Any) -> Any:
    if kind == "constexpr" and (value is None or isinstance(value, bool | int | float)):
        return value
    if kind == "constexpr" and isinstance(value, str) and not value.startswith("*"):
        return value
    if kind[0] == "*" and kind[1:] in _TYPES:
        return f"{kind}:{_ALIGNED if value == 'D' else _UNALIGNED}"
    if kind in ("i32", "i64"):
        return (_LONG if kind == "i64" else 0) + (_ALIGNED if value == "D" else 3)
    if kind == "fp32":
        return 0.5
    raise ListError(f"{kernel}: an argument of type {kind} ({value!r}) cannot be listed yet")


def _argument(listed: Any) -> Any:
    if isinstance(listed, str) and listed.startswith("*"):
        name, _, alignment = listed[1:].partition(":")
        return _Pointer(_TYPES[name], int(alignment))
    return listed


class _Pointer:
    """Stands for a tensor, of which Triton asks the type and the address."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address


@cache
def _lists() -> list[tuple[Facts, tuple[Listed, ...]]]:
    found = json.loads(FILE.read_text())
    kernels = [
        Listed(
            kernel=k["kernel"],
            arguments=tuple(k["arguments"]),
            options=tuple(k["options"].items()),
        )
        for k in found["kernels"]
    ]
    return [(x["for"], tuple(kernels[i] for i in x["kernels"])) for x in found["lists"]]


def find_list(facts: Facts) -> tuple[Listed, ...]:
    """Return the kernels of a configuration; none where no list is of it."""
    return next((kernels for those, kernels in _lists() if those == facts), ())


def write_lists(path: Path, lists: Sequence[tuple[Facts, Sequence[Listed]]]) -> None:
    """Write lists, a kernel that several have once, one kernel a line."""
    kernels = list(dict.fromkeys(kernel for _, those in lists for kernel in those))
    number = {kernel: i for i, kernel in enumerate(kernels)}
    written = [
        {"for": dict(facts), "kernels": [number[kernel] for kernel in those]}
        for facts, those in lists
    ]
    lines = [
        json.dumps({"kernel": k.kernel, "arguments": list(k.arguments), "options": dict(k.options)})
        for k in kernels
    ]
    sections = (",\n".join(map(json.dumps, written)), ",\n".join(lines))
    path.write_text('{{"lists": [\n{}\n],\n"kernels": [\n{}\n]}}\n'.format(*sections))


def _enter_device() -> Callable[[], None]:
    """Return what makes the caller's device that of another thread; a thread begins with the first."""
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)


def _open(functions: Sequence[Any]) -> None:
    """Build Triton's driver, which takes a C compiler, and the places of compiled kernels, which two threads must not
    make at once."""
    from triton.runtime import driver

    active: Any = driver.active
    device = active.get_current_device()
    for function in functions:
        _ = function.device_caches[device]


def _load(kernel: Any) -> None:
    """Load a kernel onto the device, for which Triton 3.6 compiles a launcher."""
    _ = kernel.run


class AheadKernels:
    """One list being made ready, by threads that are begun once.

    HAZARD: launches of listed kernels come after `wait`: before, they would compile what a thread is compiling.
    """

    def __init__(
        self,
        kernels: Sequence[Listed],
        *,
        num_threads: int | None = None,
        open_driver: Callable[[Sequence[Any]], None] = _open,
        load: Callable[[Any], None] = _load,
    ) -> None:
        """`num_threads`: None for half the processors of the machine, since CUDA sources are being compiled beside."""
        num_processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self.kernels = kernels
        self.num_ready = 0
        self.num_failed = 0
        self.num_unlisted = 0
        """Kernels that launches had to make ready since `wait`."""
        self._num_threads = num_threads or max(1, min(MOST_THREADS, num_processors // 2))
        self._open_driver, self._load = open_driver, load
        self._jobs: deque[tuple[Listed, Any]] = deque()
        self._num_running = 0
        self._changed = threading.Condition()
        self._began = self._ended = self._waited = 0.0

    def begin(self, enter: Callable[[], None] | None = None) -> None:
        """Start the threads and return; `enter` is called in each, None: takes the device of the caller."""
        self._began = self._ended = time.perf_counter()
        for kernel in self.kernels:
            try:
                self._jobs.append((kernel, kernel.find()))
            except ListError as error:
                self._fail(str(error))
        if self._jobs:
            # Kernels of a start are no late ones, should something have been served here before.
            _set_hooks(None)
            self._start(self._first, enter or _enter_device())

    def wait(self, report: Callable[[str], None]) -> None:
        """Return when nothing is being compiled any more, having told `report`; then count what launches compile."""
        begin = time.perf_counter()
        with self._changed:
            while self._num_running:
                done = self.num_ready + self.num_failed
                report(f"compiling kernels: {done} of {len(self.kernels)}")
                self._changed.wait(WAIT_SECONDS)
        self._waited = time.perf_counter() - begin
        self.num_unlisted = 0
        if importlib.util.find_spec("triton") is not None:
            _set_hooks(self._count)

    def outcome(self) -> str:
        """Say what became of the list, once everything has been launched that a start launches."""
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        if not self.kernels:
            return (
                "no list of Triton kernels is for this configuration: "
                f"{self.num_unlisted} were compiled, or read from the cache, one by one"
            )
        return (
            f"Triton kernels: {self.num_ready} ready ahead of their first launch{failed}, in "
            f"{self._ended - self._began:.1f} s by {self._num_threads} threads, of which the start waited "
            f"{self._waited:.1f} s; {self.num_unlisted} were not in the list and came one by one"
        )

    def _count(self, **_: Any) -> None:
        self.num_unlisted += 1

    def _start(self, work: Callable[[Callable[[], None]], None], enter: Callable[[], None]) -> None:
        def run() -> None:
            try:
                enter()
                work(enter)
            except Exception as error:  # noqa: BLE001 - drivers raise anything; launches meet it again
                self._fail(f"kernels are not compiled ahead: {_first_line(error)}")
                self._jobs.clear()
            finally:
                with self._changed:
                    self._num_running -= 1
                    self._ended = time.perf_counter()
                    self._changed.notify_all()

        with self._changed:
            self._num_running += 1
        try:
            threading.Thread(target=run, name="ahead").start()
        except RuntimeError as error:
            with self._changed:
                self._num_running -= 1
            _logger.warning("kernels are compiled ahead by fewer threads: %s", error)

    def _first(self, enter: Callable[[], None]) -> None:
        self._open_driver([function for _, function in self._jobs])
        for _ in range(self._num_threads - 1):
            self._start(self._work, enter)
        self._work(enter)

    def _work(self, _enter: Callable[[], None]) -> None:
        while threading.main_thread().is_alive():
            try:
                kernel, function = self._jobs.popleft()
            except IndexError:
                return
            try:
                self._load(kernel.make(function))
            except Exception as error:  # noqa: BLE001 - compilers raise anything; its launch meets it again
                self._fail(f"{kernel.kernel} could not be compiled ahead: {_first_line(error)}")
            else:
                with self._changed:
                    self.num_ready += 1

    def _fail(self, words: str) -> None:
        with self._changed:
            self.num_failed += 1
        _logger.warning("%s", words)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _set_hooks(after: Callable[..., None] | None) -> None:
    """Let Triton call `after` when a kernel is ready that was not; it has one pair of hooks in a process."""
    from triton import knobs

    hooks: Any = knobs.runtime
    hooks.jit_cache_hook, hooks.jit_post_compile_hook = None, after
