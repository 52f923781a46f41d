"""Run implementations against their references: fresh random inputs, poisoned outputs, all cases."""

from __future__ import annotations

import copy
import difflib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rose.kernels import registry
from rose.kernels.cases import Case, Tolerance, compare, poison
from rose.kernels.registry import Implementation, Operation, Regime
from rose.utils.device import DeviceFacts
from rose.utils.errors import ContractError


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one implementation on one case."""

    operation: str
    implementation: str
    case: str
    status: str
    """ok, failed or skipped."""
    detail: str = ""


def cases_module(name: str) -> ModuleType:
    """Return `cases.py` of a kernel folder."""
    return importlib.import_module(f"rose.kernels.{name}.cases")


def require_names(
    operations: Sequence[str], *, implementation: str | None, case: str | None
) -> None:
    """Refuse an implementation or a case that none of the operations has: nothing would be run, and nothing fail.

    Raises  ContractError with the known names, and the files that were left out
    """
    problems = []
    known = {i.name for name in operations for i in registry.implementations(name)} - {"reference"}
    if implementation is not None and implementation not in known:
        left_out = sorted({file for name in operations for file, _ in registry.left_out(name)})
        absent = f"; left out: {', '.join(left_out)}" if left_out else ""
        problems.append(
            f"implementation {implementation!r} is in none of {', '.join(operations)}; "
            f"known: {', '.join(sorted(known))}{absent}"
        )
    cases = {c.name for name in operations for c in cases_module(name).CASES}
    if case is not None and case not in cases:
        near = difflib.get_close_matches(case, cases, n=5)
        like = f"; like it: {', '.join(near)}" if near else ""
        problems.append(
            f"case {case!r} is in none of {', '.join(operations)}, which have {len(cases)} cases{like}"
        )
    if problems:
        raise ContractError("\n".join(problems))


def clone(arguments: dict[str, Any]) -> dict[str, Any]:
    """Copy every tensor of one call, also those inside weights, so that two runs share nothing.

    Aliasing  an argument passed twice (a residual that is the output) is one tensor in the copy too.
    """
    copies = {id(v): _clone_tensor(v) for v in arguments.values() if isinstance(v, Tensor)}
    return {
        k: copies[id(v)] if isinstance(v, Tensor) else copy.deepcopy(v)
        for k, v in arguments.items()
    }


def _clone_tensor(tensor: Tensor) -> Tensor:
    """Copy with the same strides; `Tensor.clone` would close the gaps between rows that lie apart."""
    if tensor.is_contiguous():
        return tensor.clone()
    layout = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return layout.copy_(tensor)


def poison_outputs(operation: Operation, arguments: dict[str, Any]) -> None:
    """Poison what a call must write, but for outputs that are an input too."""
    inputs = {id(v) for k, v in arguments.items() if k not in operation.outputs}
    for name in operation.outputs:
        if isinstance(arguments[name], Tensor) and id(arguments[name]) not in inputs:
            poison(arguments[name])


def is_runnable(
    implementation: Implementation, case: Case, device: DeviceFacts, *, interpret: bool = False
) -> str | None:
    """Say why an implementation cannot take a case on a device, or None.

    `interpret`: Triton kernels run on CPU tensors, in a process that had TRITON_INTERPRET=1 before it
    imported triton; nothing else is run then.
    """
    regime = Regime(case.phase, max(1, case.rows), max(1, case.rows))
    if case.large and device.kind == "cpu":
        return "large case, left out on a CPU"
    if interpret:
        if implementation.toolchain != "triton":
            return "no Triton kernel"
        activation = case.formats.get("activation", "float32")
        if activation not in implementation.interpreted:
            return f"the interpreter is not right for {activation}"
        implementation = replace(implementation, device="any")
    reason = implementation.refusal(case.formats, case.sizes, device, regime)
    return reason or implementation.ask_device(case.sizes)


def run_reference(
    operation: Operation,
    case: Case,
    arguments: dict[str, Any],
    *,
    rounding: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Run the reference on a copy; bf16 outputs are widened to float32, so that it rounds nothing.

    `rounding`: the formats of `Implementation.activation_rounding`; the reference rounds there too.
    """
    reference = clone(arguments)
    poison_outputs(operation, reference)
    for name in operation.outputs:
        if isinstance(reference[name], Tensor) and reference[name].dtype == torch.bfloat16:
            reference[name] = reference[name].float()
    registry.load(operation.name)
    module = importlib.import_module(f"rose.kernels.{operation.name}.reference")
    if rounding:
        module.rounded_reference(rounding, **reference)
    else:
        module.reference(**reference)
    return {n: reference[n] for n in (*operation.outputs, *operation.inouts)}


def run(operation: Operation, implementation: Implementation, arguments: dict[str, Any]) -> None:
    """Run an implementation in place on poisoned outputs, weights prepared as at load."""
    poison_outputs(operation, arguments)
    problems = registry.call_problems(operation, arguments)
    assert not problems, f"case breaks its own contract: {problems}"
    if implementation.prepare is not None:
        arguments = {**arguments, "weights": implementation.prepare(arguments["weights"])}
    implementation.function(**arguments)


def _tolerance(implementation: Implementation, case: Case, *, interpret: bool) -> Tolerance:
    module = cases_module(implementation.operation)
    if implementation.activation_rounding:
        tolerance = module.rounded_tolerance(case, implementation.activation_rounding)
    else:
        tolerance = module.tolerance(case)
    if not interpret or case.formats.get("activation") != "bf16":
        return tolerance
    return Tolerance(
        relative=4 * tolerance.relative,
        absolute=4 * tolerance.absolute,
        reason=tolerance.reason
        + "; the interpreter truncates to bf16: twice the error, all one way",
    )


class Draw:
    """The inputs of one case and what references make of them; shared by the implementations that are tried."""

    def __init__(self, operation: Operation, case: Case, seed: int, device: DeviceFacts) -> None:
        self.operation, self.case, self.device = operation, case, device
        self.arguments = cases_module(operation.name).inputs(case, seed, device.kind)
        self._wanted: dict[tuple[str, ...], dict[str, Tensor]] = {}

    def fresh(self) -> dict[str, Any]:
        """Return the arguments of a call of its own; weights are shared, nobody may write them."""
        weights = {k: v for k, v in self.arguments.items() if k == "weights"}
        return {**clone({k: v for k, v in self.arguments.items() if k != "weights"}), **weights}

    def wanted(self, rounding: tuple[str, ...]) -> dict[str, Tensor]:
        """Return what the reference writes, rounding activations likewise."""
        if rounding not in self._wanted:
            self._wanted[rounding] = run_reference(
                self.operation, self.case, self.arguments, rounding=rounding
            )
        return self._wanted[rounding]


def changed_inputs(
    operation: Operation, before: dict[str, Any], after: dict[str, Any]
) -> list[str]:
    """Return the names of tensors that the contract does not let a call write, and that changed."""
    written = {id(after[name]) for name in (*operation.outputs, *operation.inouts)}
    return [
        name
        for name, tensor in before.items()
        if isinstance(tensor, Tensor)
        and id(after[name]) not in written
        and not torch.equal(_bits(tensor), _bits(after[name]))
    ]


def _bits(tensor: Tensor) -> Tensor:
    """Return a view as integers, so that NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


def check_case(
    operation: Operation,
    implementation: Implementation,
    case: Case,
    device: DeviceFacts,
    seed: int,
    *,
    interpret: bool = False,
    draw: Draw | None = None,
) -> Outcome:
    """Compare one implementation with the reference on one case; `draw` saves drawing and reference."""
    names = {
        "operation": operation.name,
        "implementation": implementation.name,
        "case": case.name,
    }
    reason = is_runnable(implementation, case, device, interpret=interpret)
    if reason is not None:
        return Outcome(**names, status="skipped", detail=reason)
    draw = draw or Draw(operation, case, seed, device)
    wanted, arguments = draw.wanted(implementation.activation_rounding), draw.fresh()
    run(operation, implementation, arguments)
    if device.kind == "cuda":
        torch.cuda.synchronize()
    problems = [f"{n} was changed" for n in changed_inputs(operation, draw.arguments, arguments)]
    tolerance = _tolerance(implementation, case, interpret=interpret)
    module = cases_module(operation.name)
    promised = getattr(module, "promised", lambda _case, _name, tensor: tensor)
    for name, reference in wanted.items():
        if arguments[name] is None:
            continue
        difference = compare(
            name,
            promised(case, name, arguments[name]),
            promised(case, name, reference),
            tolerance,
        )
        if difference is not None:
            problems.append(str(difference))
    status = "failed" if problems else "ok"
    return Outcome(**names, status=status, detail="; ".join(problems))


def _spread(cases: list[Case], most: int) -> list[Case]:
    """Keep at most so many cases, the first among them, and the last where there are two."""
    if len(cases) <= most:
        return cases
    if most < 2:
        return cases[:most]
    return [cases[i * (len(cases) - 1) // (most - 1)] for i in range(most)]


def check_all(
    device: DeviceFacts,
    *,
    operations: list[str] | None = None,
    only: str | None = None,
    case_name: str | None = None,
    seed: int = 0,
    interpret: bool = False,
    few: int | None = None,
    toolchain: str | None = None,
    is_small: bool = False,
) -> Iterator[Outcome]:
    """Check every implementation over every case, one outcome at a time.

    `few`: at most so many of the cases that an implementation can take, spread over all of them.
    `toolchain`: only implementations written with it; `is_small`: only cases that a CPU could run too.

    Raises  ContractError for a name that is not known
    """
    names = operations or registry.operation_names()
    require_names(names, implementation=only, case=case_name)
    for name in names:
        operation = registry.load(name)
        tried = [
            i
            for i in registry.implementations(name)
            if i.name != "reference" and only in (None, i.name) and toolchain in (None, i.toolchain)
        ]
        cases = [
            c
            for c in cases_module(name).CASES
            if case_name in (None, c.name) and not (is_small and c.large)
        ]
        chosen = {i.name: {c.name for c in cases} for i in tried}
        if few is not None:
            for i in tried:
                able = [c for c in cases if is_runnable(i, c, device, interpret=interpret) is None]
                chosen[i.name] = {c.name for c in _spread(able, few)}
        for case in cases:
            implementations = [i for i in tried if case.name in chosen[i.name]]
            yield from check_together(
                operation, implementations, case, device, seed, interpret=interpret
            )


def check_together(
    operation: Operation,
    implementations: list[Implementation],
    case: Case,
    device: DeviceFacts,
    seed: int,
    *,
    interpret: bool = False,
) -> Iterator[Outcome]:
    """Check several implementations on the same inputs of one case."""
    draw: Draw | None = None
    for implementation in implementations:
        try:
            if is_runnable(implementation, case, device, interpret=interpret) is None:
                draw = draw or Draw(operation, case, seed, device)
            yield check_case(
                operation, implementation, case, device, seed, interpret=interpret, draw=draw
            )
        except Exception as error:  # noqa: BLE001 - one broken kernel must not hide the others
            yield Outcome(
                operation=operation.name,
                implementation=implementation.name,
                case=case.name,
                status="failed",
                detail=f"{type(error).__name__}: {error}",
            )
