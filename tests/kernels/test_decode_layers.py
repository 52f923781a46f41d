"""The fusion of all blocks: its cases decide which experts are chosen, and find what may go wrong between the parts."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest

from rose.kernels import registry
from rose.kernels.cases import compare
from rose.kernels.check import Draw, cases_module, check_case, poison_outputs
from rose.kernels.registry import Band, Implementation
from rose.kernels.weights import StackWeights
from rose.utils.device import CPU

OPERATION = registry.load("decode_layers")
CASES = {c.name: c for c in cases_module("decode_layers").CASES}
SMALL = [c for c in CASES.values() if not c.large and c.sizes["D"] < 1000]
REFERENCE = importlib.import_module("rose.kernels.decode_layers.reference")


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_rounding_cannot_change_which_experts_are_chosen(case, monkeypatch):
    gaps, route = [], REFERENCE.moe_route

    def seen(x_TD, *, weights, expert_ids_TK, expert_weights_TK):
        route(
            x_TD,
            weights=weights,
            expert_ids_TK=expert_ids_TK,
            expert_weights_TK=expert_weights_TK,
        )
        logits_TE = x_TD.double() @ weights.matrix.to_float().double().T + weights.bias_N.double()
        best_TE = logits_TE.sort(dim=-1, descending=True).values
        gaps.append((best_TE[:, case.sizes["K"] - 1] - best_TE[:, case.sizes["K"]]).min().item())

    if case.sizes["K"] == case.sizes["E"]:
        pytest.skip("all experts are chosen")
    monkeypatch.setattr(REFERENCE, "moe_route", seen)
    for seed in range(3):
        arguments = cases_module("decode_layers").inputs(case, seed, "cpu")
        REFERENCE.reference(**arguments)
    # Logits are float32 sums of a few units out of a stream that rounding moves by a fiftieth at most.
    assert len(gaps) == 3 * case.sizes["B"]
    assert min(gaps) > 0.3


@pytest.mark.parametrize(
    ("chosen", "num_shared"), [("same", 4), ("last", 4), ("halved", 2), ("spread", 0)]
)
def test_the_tokens_of_a_case_share_as_many_experts_as_it_says(chosen, num_shared, monkeypatch):
    case = CASES["model_two"]
    case = replace(case, options={**case.options, "chosen": chosen})
    shared, route = [], REFERENCE.moe_route

    def seen(x_TD, *, expert_ids_TK, **others):
        route(x_TD, expert_ids_TK=expert_ids_TK, **others)
        first, second = map(set, expert_ids_TK.tolist())
        shared.append(len(first & second))

    monkeypatch.setattr(REFERENCE, "moe_route", seen)
    REFERENCE.reference(**cases_module("decode_layers").inputs(case, 0, "cpu"))
    assert len(shared) == 2
    assert all(n == num_shared if chosen in ("same", "last") else n >= num_shared for n in shared)
    assert chosen != "spread" or min(shared) < 2


def test_timing_a_case_again_and_again_chooses_the_same_experts(monkeypatch):
    chosen, route = [], REFERENCE.moe_route

    def seen(x_TD, *, expert_ids_TK, **others):
        route(x_TD, expert_ids_TK=expert_ids_TK, **others)
        chosen.append(expert_ids_TK.sort(dim=1).values.tolist())

    monkeypatch.setattr(REFERENCE, "moe_route", seen)
    case = replace(CASES["bf16_24_blocks"], timed=True)
    arguments = cases_module("decode_layers").inputs(case, 0, "cpu")
    for _ in range(40):
        REFERENCE.reference(**arguments)
    assert chosen == chosen[:24] * 40


def without_last_addition(residual_SD, *args, weights, kv_pages, **options):
    """The last block's experts are left out of the stream."""
    before = []
    rms_norm = REFERENCE.rms_norm

    def kept(x, *rest, residual_TD, **more):
        rms_norm(x, *rest, residual_TD=residual_TD, **more)
        before.append(residual_SD.clone())

    REFERENCE.rms_norm = kept
    try:
        REFERENCE.reference(residual_SD, *args, weights=weights, kv_pages=kv_pages, **options)
    finally:
        REFERENCE.rms_norm = rms_norm
    residual_SD.copy_(before[-1])


def one_token_more(*args, weights, **options):
    """Windows reach one token too far back."""
    blocks = tuple(
        replace(b, window_tokens=b.window_tokens and b.window_tokens + 1) for b in weights.blocks
    )
    REFERENCE.reference(*args, weights=StackWeights(blocks=blocks), **options)


def one_place_early(*args, full_slots_S, **options):
    """New keys replace those of the token before."""
    REFERENCE.reference(*args, full_slots_S=full_slots_S - 1, **options)


def rows_swapped(residual_SD, *args, **options):
    """Each token gets the other's result."""
    REFERENCE.reference(residual_SD, *args, **options)
    residual_SD.copy_(residual_SD.flip(0))


def last_layer_unwritten(*args, kv_pages, **options):
    """The last layer attends to the new token, but its page is left as it was."""
    pages = [p.clone() for p in kv_pages]
    REFERENCE.reference(*args, kv_pages=pages, **options)
    for mine, theirs in zip(kv_pages[:-1], pages[:-1], strict=True):
        mine.copy_(theirs)


def sinks_forgotten(*args, weights, **options):
    """The softmax has no column more."""
    blocks = tuple(replace(b, sinks_H=b.sinks_H - 1e4) for b in weights.blocks)
    REFERENCE.reference(*args, weights=StackWeights(blocks=blocks), **options)


def norms_swapped(*args, weights, **options):
    """Each norm of a block takes the other's weights."""
    blocks = tuple(
        replace(b, attention_norm_D=b.expert_norm_D, expert_norm_D=b.attention_norm_D)
        for b in weights.blocks
    )
    REFERENCE.reference(*args, weights=StackWeights(blocks=blocks), **options)


def position_off(residual_SD, positions_S, *args, **options):
    """Queries and keys are turned by one position too many."""
    REFERENCE.reference(residual_SD, positions_S + 1, *args, **options)


def padding_attends(residual_SD, positions_S, lengths_S, *args, **options):
    """A padding row is taken for one with a token."""
    REFERENCE.reference(residual_SD, positions_S, lengths_S.clamp_min(1), *args, **options)


def not_clamped(*args, swiglu_limit, **options):
    REFERENCE.reference(*args, swiglu_limit=1e9, **options)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (without_last_addition, "two"),
        (one_token_more, "two"),
        (one_place_early, "two"),
        (rows_swapped, "two"),
        (last_layer_unwritten, "two"),
        (sinks_forgotten, "two"),
        (norms_swapped, "two"),
        (position_off, "two"),
        (padding_attends, "padding_last"),
        (not_clamped, "clamped"),
    ],
)
def test_what_goes_wrong_between_the_parts_is_found(function, name, dtype):
    case = CASES[name]
    formats = {o: dtype for o in ("activation", "kv", "projection")}
    case = replace(case, formats={**case.formats, **formats})
    draw = Draw(OPERATION, case, 0, CPU)

    def outcome(function):
        tried = Implementation(
            operation="decode_layers", name="tried", function=function, band=Band.TUNED
        )
        return check_case(OPERATION, tried, case, CPU, seed=0, draw=draw)

    assert outcome(REFERENCE.reference).status == "ok"
    found = outcome(function)
    assert found.status == "failed"
    assert ": relative" in found.detail  # and it did not crash


def call(**changes: Any) -> dict[str, Any]:
    return {**cases_module("decode_layers").inputs(CASES["two"], 0, "cpu"), **changes}


def test_calls_that_break_the_contract_are_refused():
    good = call()
    assert registry.call_problems(OPERATION, good) == []
    blocks = good["weights"].blocks
    two_windows = StackWeights(
        blocks=(replace(blocks[0], window_tokens=4), replace(blocks[1], window_tokens=8))
    )
    for changes, said in [
        ({"residual_SD": good["residual_SD"].T.contiguous().T}, "residual_SD is not contiguous"),
        ({"positions_S": good["positions_S"].int()}, "positions_S is torch.int32, must be"),
        ({"lengths_S": good["lengths_S"].long()}, "lengths_S is torch.int64, must be"),
        ({"window_slots_S": good["window_slots_S"][:1]}, "S is 2 in residual_SD, but 1 in window_"),
        ({"full_table_SP": good["full_table_SP"].T.contiguous().T}, "columns of full_table_SP"),
        ({"kv_pages": good["kv_pages"][:1]}, "1 layers of KV for 2 blocks"),
        ({"kv_pages": [p.mT for p in good["kv_pages"]]}, r"kv_pages[1] are not contiguous"),
        ({"weights": two_windows}, "windows of [4, 8] tokens"),
    ]:
        problems = registry.call_problems(OPERATION, call(**changes))
        assert any(said in p for p in problems), (said, problems)


def test_bytes_of_all_weights_are_counted_once():
    weights = call()["weights"]
    [first, second] = [b.num_bytes for b in weights.blocks]
    assert weights.num_bytes == first + second
    block, s = weights.blocks[0], CASES["two"].sizes
    qkv = (s["H"] + 2 * s["G"]) * s["A"] * (s["D"] + 1)
    out, router = s["D"] * (s["H"] * s["A"] + 1), s["E"] * (s["D"] + 1)
    assert first == block.experts.num_bytes + 4 * (qkv + out + router + 2 * s["D"] + s["H"])


def test_junk_in_pages_hides_no_key():
    case = CASES["two"]
    draw = Draw(OPERATION, case, 0, CPU)
    wanted = draw.wanted(())["kv_pages"]
    module = cases_module("decode_layers")
    found = [p.clone() for p in wanted]
    assert poison_outputs(OPERATION, draw.fresh()) is None
    slot = int(draw.arguments["full_slots_S"][1])
    found[1][slot // case.sizes["L"], 0, 1, slot % case.sizes["L"], 3] += 1e-3
    tolerance = module.tolerance(case)
    promised = [module.promised(case, "kv_pages", pages) for pages in (found, wanted)]
    assert compare("kv_pages", *promised, tolerance) is not None
    assert compare("kv_pages", promised[1], promised[1], tolerance) is None
