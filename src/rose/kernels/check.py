"""Run implementations against their references: fresh random inputs, poisoned outputs, all cases."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rose.kernels import registry
from rose.kernels.cases import Case, compare, poison
from rose.kernels.registry import Implementation, Operation, Regime
from rose.utils.device import DeviceFacts


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


def clone(arguments: dict[str, Any]) -> dict[str, Any]:
    """Copy every tensor of one call, also those inside weights, so that two runs share nothing."""
    return {
        k: v.clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in arguments.items()
    }


def is_runnable(implementation: Implementation, case: Case, device: DeviceFacts) -> str | None:
    """Say why an implementation cannot take a case on a device, or None."""
    regime = Regime(case.phase, max(1, case.rows), max(1, case.rows))
    if case.large and device.kind == "cpu":
        return "large case, left out on a CPU"
    return implementation.refusal(case.formats, case.sizes, device, regime)


def run_reference(operation: Operation, case: Case, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Run the reference on a copy; bf16 outputs are widened to float32, so that it rounds nothing."""
    reference = clone(arguments)
    for name in operation.outputs:
        if isinstance(reference[name], Tensor):
            poison(reference[name])
            if reference[name].dtype == torch.bfloat16:
                reference[name] = reference[name].float()
    registry.load(operation.name)
    module = importlib.import_module(f"rose.kernels.{operation.name}.reference")
    module.reference(**reference)
    return {n: reference[n] for n in (*operation.outputs, *operation.inouts)}


def run(operation: Operation, implementation: Implementation, arguments: dict[str, Any]) -> None:
    """Run an implementation in place on poisoned outputs, weights prepared as at load."""
    for name in operation.outputs:
        if isinstance(arguments[name], Tensor):
            poison(arguments[name])
    problems = operation.check_call(**arguments)
    assert not problems, f"case breaks its own contract: {problems}"
    if implementation.prepare is not None:
        arguments = {**arguments, "weights": implementation.prepare(arguments["weights"])}
    implementation.function(**arguments)


def check_case(
    operation: Operation, implementation: Implementation, case: Case, device: DeviceFacts, seed: int
) -> Outcome:
    """Compare one implementation with the reference on one case."""
    names = {
        "operation": operation.name,
        "implementation": implementation.name,
        "case": case.name,
    }
    reason = is_runnable(implementation, case, device)
    if reason is not None:
        return Outcome(**names, status="skipped", detail=reason)
    module = cases_module(operation.name)
    arguments = module.inputs(case, seed, device.kind)
    wanted = run_reference(operation, case, arguments)
    run(operation, implementation, arguments)
    if device.kind == "cuda":
        torch.cuda.synchronize()
    problems = []
    for name, reference in wanted.items():
        if arguments[name] is None:
            continue
        difference = compare(name, arguments[name], reference, module.tolerance(case))
        if difference is not None:
            problems.append(str(difference))
    status = "failed" if problems else "ok"
    return Outcome(**names, status=status, detail="; ".join(problems))


def check_all(
    device: DeviceFacts,
    *,
    operations: list[str] | None = None,
    only: str | None = None,
    seed: int = 0,
) -> Iterator[Outcome]:
    """Check every implementation over every case, one outcome at a time."""
    for name in operations or registry.operation_names():
        operation = registry.load(name)
        for implementation in registry.implementations(name):
            if implementation.name == "reference" or only not in (None, implementation.name):
                continue
            for case in cases_module(name).CASES:
                try:
                    yield check_case(operation, implementation, case, device, seed)
                except Exception as error:  # noqa: BLE001 - one broken kernel must not hide the others
                    yield Outcome(
                        operation=name,
                        implementation=implementation.name,
                        case=case.name,
                        status="failed",
                        detail=f"{type(error).__name__}: {error}",
                    )
