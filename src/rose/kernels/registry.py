"""Which implementations of an operation exist, and which one runs where.

A kernel folder has `contract.py` (an `Operation`), `reference.py`, `cases.py` and files named
`<toolchain>[_<word>]_impl.py` that call `register`. `bind` chooses once, when a model is built: one
implementation per regime (phase and number of rows). Nothing is chosen per call. `explain` says why.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

from rose.utils.device import CPU, DeviceFacts
from rose.utils.errors import ContractError

_PACKAGE = "rose.kernels"
TOOLCHAINS = {
    "torch": None,
    "triton": "triton",
    "gluon": "triton",
    "cuda": None,
    "flashinfer": "flashinfer",
    "deepgemm": "deep_gemm",
}
"""First word of an implementation file -> the module it needs; without it the file is not imported."""


class Band(IntEnum):
    """How special an implementation is; the highest that may run is bound."""

    REFERENCE = 0
    PORTABLE = 1
    TUNED = 2
    SPECIALISED = 3


@dataclass(frozen=True, slots=True)
class Regime:
    """A phase and a closed range of rows (tokens in the step)."""

    phase: str
    min_rows: int
    max_rows: int

    def __str__(self) -> str:
        if self.min_rows == self.max_rows:
            return f"{self.phase} {self.min_rows}"
        most = "" if self.is_endless else self.max_rows
        return f"{self.phase} {self.min_rows}..{most}"

    @property
    def is_endless(self) -> bool:
        """Whether steps of any more rows are of it too."""
        return self.max_rows == MAX_ROWS

    def holds(self, phase: str, num_rows: int) -> bool:
        """Tell whether a step is of this regime."""
        return self.phase == phase and self.min_rows <= num_rows <= self.max_rows


MAX_ROWS = 1 << 30
LONG_STEP = 2049
"""Rows from which on a step of prefill may have implementations of its own."""
MANY_DECODE = Regime("decode", 513, MAX_ROWS)
"""More sequences than decode kernels are made for: what short prefill has is bound, and shown in the table."""
SHORT_PREFILL = Regime("prefill", 1, LONG_STEP - 1)
REGIMES = (
    Regime("decode", 1, 1),
    Regime("decode", 2, 16),
    Regime("decode", 17, 48),
    Regime("decode", 49, 256),
    Regime("decode", 257, 512),
    SHORT_PREFILL,
    Regime("prefill", LONG_STEP, MAX_ROWS),
)
"""Decode: one new token per sequence, replayed from graphs. Everything else counts as prefill. An implementation is
bound for a regime only if it takes all of its rows; a batch counts with the rows that it is padded to."""

FormatNames = Mapping[str, str]
Sizes = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A contract: what any implementation of it must do.

    `signature` is a function without a body whose docstring is the contract; implementations take
    exactly its parameters. `outputs` names the parameters written to; `check` poisons them.
    """

    name: str
    signature: Callable[..., None]
    sizes: tuple[str, ...]
    """Names of the numbers that `bind` is given, e.g. ("D",)."""
    outputs: tuple[str, ...]
    inouts: tuple[str, ...] = ()
    """Parameters updated in place (read and written)."""
    formats: tuple[str, ...] = ()
    """Names of the operands whose format may vary, e.g. ("activation", "weight")."""
    validate: Callable[[FormatNames, Sizes], list[str]] = lambda _formats, _sizes: []
    """Problems with formats and sizes, at bind time."""
    check_call: Callable[..., list[str]] = lambda **_: []
    """Problems with one call's tensors; on in tests and at graph capture, off in replay."""
    regimes: tuple[Regime, ...] = REGIMES
    """Where it is bound unless `bind` is told otherwise; fewer where only some steps ask for it."""


class Compilable(Protocol):
    """A CUDA source that is compiled once and found again; safe to build from several threads."""

    def build(self) -> object:
        """Compile unless compiled."""
        ...


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute an operation, with what it needs and accepts."""

    operation: str
    name: str
    function: Callable[..., None]
    band: Band
    device: str = "any"
    """cpu, cuda or any."""
    min_capability: tuple[int, int] = (0, 0)
    max_capability: tuple[int, int] = (99, 0)
    formats: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Operand -> accepted format names; operands not named accept all."""
    phases: frozenset[str] = frozenset({"prefill", "decode"})
    rows: tuple[int, int] = (1, MAX_ROWS)
    limits: Callable[[Sizes], str | None] = lambda _sizes: None
    """Why these sizes cannot be taken, or None."""
    ask_device: Callable[[Sizes], str | None] = lambda _sizes: None
    """Why the device at hand cannot take what `limits` does, or None, as where no such device is at hand: what no
    number of `DeviceFacts` tells. May compile; asked last, where something is to be run, never for a dry model."""
    prepare: Callable[[Any], Any] | None = None
    """Relayout of the weights, run once at load; its result is passed as `weights`."""
    workspace: Callable[[Sizes, int, int], int] = lambda _sizes, _rows, _longest: 0
    """(sizes, rows, longest sequence in tokens) -> bytes that a call holds at its peak besides its operands; for the
    memory plan, which is made before anything can be measured. Left out where it is a few MiB."""
    activation_rounding: tuple[str, ...] = ()
    """Formats to which it rounds the inputs of its matrices, one name each in the order of the operation's
    `rounded_reference`; empty: it rounds nothing that the contract does not. `check` then compares with
    `rounded_reference(activation_rounding, ...)`."""
    is_batch_invariant: bool = False
    """Whether each row of the result has the same bits whatever other rows there are, at every number of rows and in
    every phase it is bound for. What an argument in its file, and a test, shows; not what one run suggests."""
    is_unfused: bool = False
    """Of a fusion: it runs the parts one after the other. Where it is bound, a model runs its own layers instead."""
    is_capturable: bool = True
    """Whether a CUDA graph can hold it; False: it asks the device something, and is timed call by call."""
    interpreted: frozenset[str] = frozenset({"float32"})
    """Triton only: activation dtypes for which the interpreter's results mean something. Its bf16 products
    are garbage and its casts truncate; name bf16 only where every product is taken in float32 there."""
    library: Compilable | None = None
    """What must be compiled before the first call; `begin_compiling` starts that early, beside other work."""
    note: str = ""

    @property
    def toolchain(self) -> str:
        """First word of the file it comes from."""
        return self.function.__module__.rsplit(".", 1)[-1].split("_")[0]

    def runs_on(self, device: DeviceFacts) -> bool:
        """Whether the device is one that it is made for."""
        return self._device_refusal(device) is None

    def _device_refusal(self, device: DeviceFacts) -> str | None:
        if self.device not in ("any", device.kind):
            return f"needs {self.device}"
        if device.kind == "cuda" and not (
            self.min_capability <= device.capability <= self.max_capability
        ):
            return f"capability {device.capability} outside {self.min_capability}..{self.max_capability}"
        return None

    def refusal(
        self, formats: FormatNames, sizes: Sizes, device: DeviceFacts, regime: Regime
    ) -> str | None:
        """Say why this implementation cannot be bound there, or None."""
        if reason := self._device_refusal(device):
            return reason
        if regime.phase not in self.phases:
            return f"only for {', '.join(sorted(self.phases))}"
        if regime.min_rows < self.rows[0] or regime.max_rows > self.rows[1]:
            return f"only for {_rows_told(*self.rows)}"
        for operand, accepted in self.formats.items():
            if formats.get(operand) not in accepted:
                return f"{operand} is {formats.get(operand)}, takes {', '.join(sorted(accepted))}"
        return self.limits(sizes)


def _rows_told(least: int, most: int) -> str:
    if most == MAX_ROWS:
        return f"{least} rows or more"
    return f"{least}..{most} rows" if least != most else f"{least} row{'' if least == 1 else 's'}"


def call_problems(operation: Operation, arguments: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with one call: shapes against the letters of the contract, then `check_call`.

    `q_THD` has three axes and its T is that of `out_THD`; `query_starts_S1` has S + 1 entries.
    """
    problems: list[str] = []
    sizes: dict[str, tuple[int, str]] = {}
    for name, value in arguments.items():
        shape = getattr(value, "shape", None)
        axes = re.findall("[A-Z]1?", name.rsplit("_", 1)[-1])
        if shape is None or not axes or "".join(axes) != name.rsplit("_", 1)[-1]:
            continue
        if len(shape) != len(axes):
            problems.append(f"{name} has shape {list(shape)}, needs {len(axes)} axes")
            continue
        for axis, found in zip(axes, shape, strict=True):
            length = found - 1 if axis.endswith("1") else found
            known, where = sizes.setdefault(axis[0], (length, name))
            if known != length:
                problems.append(f"{axis[0]} is {known} in {where}, but {length} in {name}")
    return problems or operation.check_call(**arguments)


_operations: dict[str, Operation] = {}
_implementations: dict[str, dict[str, Implementation]] = {}
_absent: dict[str, list[str]] = {}
_broken: dict[str, Exception] = {}


def register(implementation: Implementation) -> Implementation:
    """Add an implementation; called at import of an `*_impl.py` file.

    Raises  ContractError where its parameters are not those of the contract or its name is taken.
    """
    operation = _operations[implementation.operation]
    wanted = list(inspect.signature(operation.signature).parameters)
    found = list(inspect.signature(implementation.function).parameters)
    if wanted != found:
        raise ContractError(
            f"{operation.name}/{implementation.name} takes ({', '.join(found)}); "
            f"the contract says ({', '.join(wanted)}); make them equal"
        )
    table = _implementations.setdefault(operation.name, {})
    if implementation.name in table:
        raise ContractError(
            f"{operation.name}/{implementation.name} is registered twice; rename one"
        )
    table[implementation.name] = implementation
    return implementation


def operation_names() -> list[str]:
    """Return the names of all kernel folders."""
    root = Path(__file__).parent
    return sorted(p.parent.name for p in root.glob("*/contract.py"))


def require_operations(names: Iterable[str]) -> None:
    """Refuse names that no kernel folder has.

    Raises  ContractError listing every one and the known names.
    """
    known = operation_names()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ContractError(
            f"kernels.only names {', '.join(unknown)}; known operations: {', '.join(known)}; change kernels.only"
        )


def require_implementations(only: Mapping[str, str]) -> None:
    """Refuse operations and implementations that do not exist, before anything slow begins.

    Raises  ContractError listing every one and the known names, with those whose toolchain is not installed.
    """
    require_operations(only)
    problems = []
    for name, wanted in only.items():
        known = [i.name for i in implementations(name)]
        if wanted not in known:
            absent = [f"{file} ({why})" for file, why in left_out(name)]
            problems.append(
                f"kernels.only {name}={wanted}: no such implementation; known: {', '.join(known)}"
                + (f"; left out: {', '.join(absent)}" if absent else "")
                + "; change kernels.only"
            )
    if problems:
        raise ContractError("\n".join(problems))


def load(name: str) -> Operation:
    """Import a kernel folder with every implementation whose toolchain is installed.

    Raises  ContractError with the known names.
    """
    if name in _broken:
        # Some of its files registered, some did not; importing again would not run the former anew.
        raise _broken[name]
    if name in _operations:
        return _operations[name]
    if name not in operation_names():
        raise ContractError(
            f"operation {name!r} is not known; known: {', '.join(operation_names())}"
        )
    operation: Operation = importlib.import_module(f"{_PACKAGE}.{name}.contract").OPERATION
    _operations[name] = operation
    _absent[name] = []
    try:
        _import_implementations(operation)
    except Exception as error:
        _broken[name] = error
        raise
    return operation


def _import_implementations(operation: Operation) -> None:
    name = operation.name
    folder = Path(__file__).parent / name
    register(_reference_implementation(operation))
    for module in pkgutil.iter_modules([str(folder)]):
        if not module.name.endswith("_impl"):
            continue
        toolchain = module.name.split("_")[0]
        if toolchain not in TOOLCHAINS:
            raise ContractError(
                f"{folder / module.name}.py: toolchain {toolchain!r} is not known; "
                f"allowed: {', '.join(TOOLCHAINS)}"
            )
        needed = TOOLCHAINS[toolchain]
        if needed is not None and importlib.util.find_spec(needed) is None:
            _absent[name].append(f"{module.name}: {needed} is not installed")
            continue
        importlib.import_module(f"{_PACKAGE}.{name}.{module.name}")


def _reference_implementation(operation: Operation) -> Implementation:
    module = importlib.import_module(f"{_PACKAGE}.{operation.name}.reference")
    return Implementation(
        operation=operation.name,
        name="reference",
        function=module.reference,
        band=Band.REFERENCE,
        note="definition of the operation; float32 inside",
    )


def implementations(name: str) -> list[Implementation]:
    """Return all registered implementations of an operation, the most special first."""
    load(name)
    return sorted(_implementations[name].values(), key=lambda i: (-i.band, i.name))


def left_out(name: str) -> list[tuple[str, str]]:
    """Return the implementation files of an operation that were not imported, each with the reason."""
    load(name)
    return [(file, why) for file, _, why in (a.partition(": ") for a in _absent[name])]


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One line of the start-up table: what runs in one regime of an operation."""

    operation: str
    regime: Regime
    implementation: str
    is_unfused: bool = False
    """See Implementation."""
    refused_here: str = ""
    """What the device at hand could not take, and why; empty where nothing was refused."""

    @property
    def told(self) -> str:
        """The implementation in words: its name, and what was refused before it."""
        return self.implementation + (f" ({self.refused_here})" if self.refused_here else "")


class BoundOperation:
    """The table of one operation in one model: regime -> implementation, with prepared weights."""

    def __init__(
        self,
        operation: Operation,
        table: dict[Regime, Implementation],
        *,
        sizes: Sizes | None = None,
        check_calls: bool = False,
        refused_here: Mapping[Regime, str] | None = None,
    ) -> None:
        """`refused_here`: what the device at hand could not take, and why, for the start-up table."""
        self.operation = operation
        self.table = table
        self._refused_here = refused_here or {}
        self.sizes = sizes or {}
        self._check_calls = check_calls
        self._calls = {r: self._checked(i.function) for r, i in table.items()}

    def _checked(self, function: Callable[..., None]) -> Callable[..., None]:
        return _with_checks(self.operation, function) if self._check_calls else function

    def prepare(self, weights: Any) -> int:
        """Relayout `weights` for each implementation in the table; return the bytes now held.

        Aliasing  implementations with the same `prepare` share one copy; those without share `weights`.
        """
        prepared: dict[Callable[[Any], Any] | None, Any] = {}
        for regime, implementation in self.table.items():
            if implementation.prepare not in prepared:
                build = implementation.prepare
                prepared[build] = weights if build is None else build(weights)
            self._calls[regime] = _with_weights(
                self._checked(implementation.function), prepared[implementation.prepare]
            )
        return sum(int(w.num_bytes) for w in prepared.values())

    def select(self, phase: str, num_rows: int) -> Callable[..., None]:
        """Return the function for a step; a lookup in the fixed table, no choice."""
        for regime, call in self._calls.items():
            if regime.holds(phase, num_rows):
                return call
        raise ContractError(f"{self.operation.name}: no regime for {phase} with {num_rows} rows")

    def rows(self) -> list[KernelRow]:
        """Return lines for the start-up table."""
        return [
            KernelRow(self.operation.name, r, i.name, i.is_unfused, self._refused_here.get(r, ""))
            for r, i in self.table.items()
        ]


def _with_weights(function: Callable[..., None], weights: Any) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        function(*args, weights=weights, **kwargs)

    return call


def _with_checks(operation: Operation, function: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(function)

    def call(*args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(*args, **kwargs).arguments
        problems = call_problems(operation, arguments)
        if problems:
            raise ContractError(f"{operation.name}: " + "; ".join(problems))
        function(*args, **kwargs)

    return call


def bind(
    name: str,
    *,
    formats: FormatNames,
    sizes: Sizes,
    device: DeviceFacts = CPU,
    regimes: tuple[Regime, ...] | None = None,
    only: Mapping[str, str] | None = None,
    check_calls: bool = False,
    batch_invariant: bool = False,
    asks_device: bool = True,
) -> BoundOperation:
    """Choose one implementation per regime: the highest band that accepts formats, sizes and device.

    `regimes`: None for those of the operation.
    `only` forces implementations by operation name (config `kernels.only`), e.g. {"gemm": "reference"}.
    `check_calls`: every call is held against the contract first (config `kernels.check_calls`).
    `batch_invariant`: one implementation for all regimes, of those that say they are (`kernels.batch_invariant`).
    `asks_device`: False for a dry model, which may stand for another machine.

    Raises  ContractError listing every refused candidate and why.
    """
    operation = load(name)
    regimes = operation.regimes if regimes is None else regimes
    missing = [s for s in operation.sizes if s not in sizes]
    problems = [f"size {s} is missing" for s in missing] + operation.validate(formats, sizes)
    if problems:
        raise ContractError(f"{name}: " + "; ".join(problems))
    forced = (only or {}).get(name)
    candidates = [i for i in implementations(name) if forced in (None, i.name)]
    if not candidates:
        known = ", ".join(i.name for i in implementations(name))
        raise ContractError(f"{name}: implementation {forced!r} is not known; known: {known}")
    if batch_invariant:
        table = _invariant_table(candidates, formats, sizes, device, _with_many_decode(regimes))
        return BoundOperation(operation, table, sizes=sizes, check_calls=check_calls)
    table, refused_here = {}, {}
    for regime in regimes:
        refused = []
        for implementation in candidates:
            reason = implementation.refusal(formats, sizes, device, regime)
            if reason is None and asks_device:
                reason = implementation.ask_device(sizes)
                if reason is not None:
                    refused_here[regime] = f"{implementation.name}: {reason}"
            if reason is None:
                table[regime] = implementation
                break
            refused.append(f"{implementation.name}: {reason}")
        else:
            asked = f"; kernels.only asks {forced} of every step; change kernels.only"
            raise ContractError(
                f"{name} ({regime}): nothing can run; {'; '.join(refused)}{asked if forced else ''}"
            )
    if regimes == REGIMES:
        table[MANY_DECODE] = table[SHORT_PREFILL]
    return BoundOperation(
        operation, table, sizes=sizes, check_calls=check_calls, refused_here=refused_here
    )


def _with_many_decode(regimes: tuple[Regime, ...]) -> tuple[Regime, ...]:
    return (*regimes, MANY_DECODE) if regimes == REGIMES else regimes


class NotInvariant(ContractError):
    """No implementation of an operation serves the batch-invariant mode."""


def _invariant_table(
    candidates: list[Implementation],
    formats: FormatNames,
    sizes: Sizes,
    device: DeviceFacts,
    regimes: tuple[Regime, ...],
) -> dict[Regime, Implementation]:
    """Return the first candidate that may run in every regime and says that it is batch-invariant, for all of them."""
    refused = []
    for candidate in candidates:
        reasons = [candidate.refusal(formats, sizes, device, regime) for regime in regimes]
        if not candidate.is_batch_invariant:
            reasons = ["its results may depend on the batch"]
        reason = next((r for r in reasons if r is not None), None)
        if reason is None:
            return dict.fromkeys(regimes, candidate)
        refused.append(f"{candidate.name}: {reason}")
    raise NotInvariant(
        f"{candidates[0].operation}: kernels.batch_invariant is on and no implementation serves it; "
        + "; ".join(refused)
    )


def begin_compiling(bound: BoundOperation) -> None:
    """Compile the CUDA sources of a bound table in threads of their own; returns at once.

    A source that does not compile is reported where it is first called, with the compiler's words.
    """

    def build(library: Compilable) -> None:
        with contextlib.suppress(Exception):
            library.build()

    libraries = {id(i.library): i.library for i in bound.table.values() if i.library is not None}
    for library in libraries.values():
        threading.Thread(target=build, args=(library,), daemon=True).start()


def explain(
    name: str,
    *,
    formats: FormatNames,
    sizes: Sizes,
    device: DeviceFacts = CPU,
    batch_invariant: bool = False,
) -> list[tuple[str, str, str]]:
    """Return (regime, implementation, "bound" or why not) for each regime and implementation, as `bind` chooses.

    Raises  NotInvariant where `batch_invariant` finds no implementation
    """
    regimes = load(name).regimes
    table: dict[Regime, Implementation] = {}
    if batch_invariant:
        table = _invariant_table(
            implementations(name), formats, sizes, device, _with_many_decode(regimes)
        )
    lines = []
    for regime in regimes:
        for implementation in implementations(name):
            reason = implementation.refusal(formats, sizes, device, regime)
            reason = reason or implementation.ask_device(sizes)
            if reason is None and batch_invariant and not implementation.is_batch_invariant:
                reason = "its results may depend on the batch"
            if reason is None:
                is_bound = table.setdefault(regime, implementation) is implementation
                band = implementation.band.name.lower()
                reason = f"bound ({band})" if is_bound else f"another is bound before it ({band})"
            lines.append((str(regime), implementation.name, reason))
        lines += [(str(regime), file, why) for file, why in left_out(name)]
    return lines
