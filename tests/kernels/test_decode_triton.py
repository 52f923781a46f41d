"""The Triton kernels of the decode step (projections, router, sampling) in the interpreter."""

from __future__ import annotations

import pytest

from fakes.interpreter import interpret

pytest.importorskip("triton")

CHECK = """
import sys
from rose.kernels import registry
from rose.kernels.check import cases_module, check_case
from rose.utils.device import CPU

name, wanted = sys.argv[1], sys.argv[2].split(",")
operation = registry.load(name)
mine = {i.name: i for i in registry.implementations(name)}
found = [c for c in cases_module(name).CASES if c.name in wanted]
assert len({c.name for c in found}) == len(wanted), [c.name for c in found]
for case in found:
    outcome = check_case(operation, mine["triton"], case, CPU, 1, interpret=True)
    assert outcome.status == "ok", outcome
"""

SPLIT = """
import torch
from rose.kernels import registry
from rose.kernels.cases import FLOAT32, compare
from rose.kernels.gemm import cases
from rose.kernels.gemm.reference import reference
registry.load("gemm")
from rose.kernels.gemm import triton_impl as impl

for shape in (
    impl.Launch(tokens=16, rows=32, columns=64, splits=3),
    impl.Launch(tokens=16, rows=64, columns=128, splits=2, is_swapped=True),
):
    for weight in ("bf16", "fp8_block"):
        case = cases.make_case(
            "split", 19, cases.SMALL_RAGGED, activation="float32", weight=weight, residual="apart"
        )
        arguments = cases.inputs(case, 1, "cpu")
        wanted = {**arguments, "out_TN": arguments["out_TN"].clone()}
        reference(**wanted)
        arguments["out_TN"].fill_(float("nan"))
        impl.launch(shape, **arguments)
        wrong = compare("out_TN", arguments["out_TN"], wanted["out_TN"], FLOAT32)
        assert wrong is None, (shape, weight, wrong)
"""

SAMPLE = """
import sys
from rose.kernels import registry
from rose.kernels.sample import cases, reference
registry.load("sample")
from rose.kernels.sample import triton_impl as impl

def check(case, seed):
    arguments = cases.inputs(case, seed, "cpu")
    wanted = {**arguments, "tokens_S": arguments["tokens_S"].clone()}
    reference.reference(**wanted)
    arguments["tokens_S"].fill_(-9)
    impl.sample(**arguments)
    assert arguments["tokens_S"].equal(wanted["tokens_S"]), (case.name, arguments["tokens_S"], wanted)

check(cases.make_case("plain", 9, 3000, temperature=None), 1)
check(cases.make_case("greedy_ties", 9, 64, temperature=0.0, is_tied=True), 1)
check(cases.make_case("bf16", 3, 2100, logits="bf16"), 1)
impl._CAP, impl._SEARCH_BLOCK, impl._BLOCK = 32, 512, 128
check(cases.make_case("sorted", 2, 30, filters="mixed", is_tied=True), 2)
check(cases.make_case("ties", 5, 200, filters="mixed", is_tied=True), 3)
check(cases.make_case("searched", 6, 500, filters="mixed", temperature=None), 4)
check(cases.make_case("one", 3, 100, filters="mixed", banned="all_but_one"), 5)
"""


def test_projections_agree_with_the_reference() -> None:
    interpret(CHECK, "gemm", "rows_1,rows_17,rows_65,fp8_block_weights,no_bias,strided")


def test_split_columns_are_added_up_in_both_orders_of_operands() -> None:
    interpret(SPLIT)


def test_router_agrees_with_the_reference_and_breaks_ties_by_id() -> None:
    interpret(CHECK, "moe_route", "rows_1,rows_65,one_choice,all_experts,odd_experts,ties")


def test_sampled_tokens_are_those_of_the_reference() -> None:
    interpret(SAMPLE)
