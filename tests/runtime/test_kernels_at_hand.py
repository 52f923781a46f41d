"""Whatever Triton kernels serving on an H200 needs, the start has compiled: nobody waits for a compiler in between.

In processes of their own: they change Triton and torch, and other tests want Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rose.runtime.graphs import BATCH_SIZES

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
CHILD = """
import json
from fakes.launches import late_kernels
from rose.config.scheduler import SchedulerConfig
from rose.kernels.ahead import find_list
from rose.kernels.registry import load

def parts(num_sequences):
    load("attention_decode")
    from rose.kernels.attention_decode.triton_impl import choose
    return choose(num_sequences, 8, 131072, None).num_splits

def is_listed(size, kv):
    from fakes import launches
    facts, at_start = launches.list_of(size, {"kv": kv})
    with launches.recording() as found:
        for kernel in at_start:
            kernel.make(kernel.find())
        again = list(found.listed)
    return [tuple(at_start) == find_list(facts), again == at_start]

def forget_bound(engine):
    engine.decoder._longest = None

few = SchedulerConfig(max_sequences=21)
found = [{cases}]
print(json.dumps(found))
"""


def _found(*cases: str) -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD.replace("{cases}", ", ".join(cases))],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_serving_needs_no_kernel_that_the_start_has_not_compiled():
    """A bound on lengths of its own gives a step launch shapes of its own: what once compiled while serving."""
    served, spoilt, eager, few = _found(
        "late_kernels(150)",
        "late_kernels(60, forget_bound)",
        "late_kernels(60, use_graphs=False, quant={'kv': 'fp8_e4m3'})",
        "late_kernels(60, scheduler=few, context_tokens=20011)",
    )
    assert served["late"] == eager["late"] == few["late"] == []
    assert served["counted"] == eager["counted"] == 1
    assert served["at_start"] <= 49, (
        "the start takes about 0.4 s for each; say in performance.md why it grew"
    )
    names = {name for name, _ in spoilt["late"]}
    assert names == {
        "attention_decode.triton_impl._part_kernel",
        "attention_decode.triton_impl._combine_kernel",
    }


def test_a_history_has_few_numbers_of_parts_and_graphs_have_those_that_fill_the_machine():
    sizes = range(1, 257)
    (found,) = _found("[parts(n) for n in range(1, 257)]")
    parts = dict(zip(sizes, found, strict=True))
    four_a_multiprocessor = {n: -(-132 * 4 // (8 * n)) for n in BATCH_SIZES}
    assert {n: parts[n] for n in BATCH_SIZES} == four_a_multiprocessor
    assert set(parts.values()) == set(four_a_multiprocessor.values())


def test_kernels_to_be_compiled_ahead_are_those_that_the_start_launches():
    """And what is listed of a launch asks for the kernel of that launch."""
    found = _found("is_listed('20b', 'auto')", "is_listed('120b', 'fp8_e4m3')")
    assert found == [[True, True]] * 2, (
        "run python tools/kernel_lists.py, and commit what it writes"
    )


@pytest.mark.slow
def test_so_are_those_of_the_other_lists():
    found = _found("is_listed('20b', 'fp8_e4m3')", "is_listed('120b', 'auto')")
    assert found == [[True, True]] * 2, (
        "run python tools/kernel_lists.py, and commit what it writes"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nor_does_serving_the_120b():
    (served,) = _found("late_kernels(1000, size='120b')")
    assert served["late"] == []
