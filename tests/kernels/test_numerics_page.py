"""docs/numerics.md states the tolerances that are in force, no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.kernels import registry
from rose.kernels.check import cases_module

PAGE = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()


def stated(name: str) -> set[tuple[float, float]]:
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith(f"| {name} |")]
    return {(float(relative), float(absolute)) for _, _, relative, absolute, _ in rows}


@pytest.mark.parametrize("name", registry.operation_names())
def test_the_page_states_the_tolerances_in_force(name: str):
    module = cases_module(name)
    tolerances = [module.tolerance(case) for case in module.CASES]
    if hasattr(module, "rounded_tolerance"):
        tolerances.append(module.rounded_tolerance(module.CASES[0], ("fp8_group128",)))
    assert stated(name) == {(t.relative, t.absolute) for t in tolerances}
