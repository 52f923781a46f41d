"""A check finds what is wrong: each way of being wrong is tried."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from rose.kernels import __main__ as kernels_program
from rose.kernels import registry
from rose.kernels.__main__ import main as kernels_main
from rose.kernels.cases import BF16_OUT, EXACT, FLOAT32, Case, compare, poison
from rose.kernels.check import (
    cases_module,
    check_all,
    check_case,
    clone,
    is_runnable,
    run_reference,
)
from rose.kernels.formats import plain
from rose.kernels.registry import Band, Implementation
from rose.kernels.rms_norm.reference import reference
from rose.kernels.weights import LinearWeights
from rose.utils.device import CPU, DeviceFacts

CASE = next(c for c in cases_module("rms_norm").CASES if c.name == "float32")


def outcome(function, *, operation="rms_norm", case=CASE, **details):
    implementation = Implementation(
        operation=operation, name="tried", function=function, band=Band.TUNED, **details
    )
    return check_case(registry.load(operation), implementation, case, CPU, seed=0)


def right(x_TD, weight_D, *, eps, residual_TD, out_TD):
    reference(x_TD, weight_D, eps=eps, residual_TD=residual_TD, out_TD=out_TD)


def test_skipped_cases_are_counted_by_reason(capsys):
    assert kernels_main(["check", "rms_norm", "--device", "cpu", "--only", "triton"]) == 0
    lines = capsys.readouterr().out.splitlines()
    *reasons, total = lines
    assert sum(int(line.split()[1].rstrip(":")) for line in reasons) == int(
        total.split(", ")[2].split()[0]
    )
    assert any("large case, left out on a CPU" in line for line in reasons)


def test_ctrl_c_ends_a_check_with_one_word(monkeypatch, capsys):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels_program, "check_all", interrupted)
    assert kernels_main(["check"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("seed", [str(2**63), str(2**64), "-1", "x"])
def test_a_seed_that_no_generator_takes_is_refused_before_any_case(seed, capsys):
    with pytest.raises(SystemExit) as ended:
        kernels_main(["check", "rms_norm", "--device", "cpu", f"--seed={seed}"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("error: argument --seed: ")
    assert told.count("\n") == 1


def test_a_check_of_nothing_says_so(capsys):
    few = ["check", "moe_experts", "--device", "cpu", "--few", "1", "--only", "cuda_decode"]
    assert kernels_main(few) == 0
    assert "nothing to check: no implementation that was asked" in capsys.readouterr().out


def test_the_largest_seed_is_taken(capsys):
    few = ["check", "rms_norm", "--device", "cpu", "--few", "1", "--seed", str(2**63 - 1)]
    assert kernels_main(few) == 0


def test_a_right_kernel_passes():
    assert outcome(right).status == "ok"


def unwritten(x_TD, weight_D, *, eps, residual_TD, out_TD):
    residual_TD += x_TD


def last_row_unwritten(x_TD, weight_D, *, eps, residual_TD, out_TD):
    right(x_TD, weight_D, eps=eps, residual_TD=residual_TD, out_TD=out_TD.clone())
    kept = out_TD[-1].clone()
    right(x_TD * 0, weight_D, eps=eps, residual_TD=residual_TD, out_TD=out_TD)
    out_TD[-1] = kept


def off_by_one_row(x_TD, weight_D, *, eps, residual_TD, out_TD):
    right(x_TD, weight_D, eps=eps, residual_TD=residual_TD, out_TD=out_TD)
    out_TD.copy_(out_TD.roll(1, dims=0))


def off_by_one_column(x_TD, weight_D, *, eps, residual_TD, out_TD):
    right(x_TD, weight_D, eps=eps, residual_TD=residual_TD, out_TD=out_TD)
    out_TD[:, 1:] = out_TD[:, :-1].clone()


def residual_forgotten(x_TD, weight_D, *, eps, residual_TD, out_TD):
    right(x_TD, weight_D, eps=eps, residual_TD=residual_TD.clone(), out_TD=out_TD)


def input_changed(x_TD, weight_D, *, eps, residual_TD, out_TD):
    right(x_TD, weight_D, eps=eps, residual_TD=residual_TD, out_TD=out_TD)
    x_TD[0, 0] += 1


def slightly_wrong(x_TD, weight_D, *, eps, residual_TD, out_TD):
    right(x_TD, weight_D, eps=eps, residual_TD=residual_TD, out_TD=out_TD)
    out_TD *= 1.00001


def one_number_wrong(x_TD, weight_D, *, eps, residual_TD, out_TD):
    right(x_TD, weight_D, eps=eps, residual_TD=residual_TD, out_TD=out_TD)
    out_TD[3, 7] += 0.001


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (unwritten, "out_TD: relative nan"),
        (last_row_unwritten, r"first bad at \[32, 0\]: nan"),
        (off_by_one_row, "out_TD: relative"),
        (off_by_one_column, "out_TD: relative"),
        (residual_forgotten, "residual_TD: relative"),
        (input_changed, "x_TD was changed"),
        (slightly_wrong, "out_TD: relative 1"),
        (one_number_wrong, r"first bad at \[3, 7\]"),
    ],
)
def test_a_wrong_kernel_fails_and_the_reason_is_told(function, said):
    found = outcome(function)
    assert found.status == "failed"
    assert __import__("re").search(said, found.detail), found.detail


def test_a_crash_is_one_failed_outcome(monkeypatch):
    def crash(x_TD, weight_D, *, eps, residual_TD, out_TD):
        raise RuntimeError("launch failed")

    implementation = Implementation(
        operation="rms_norm", name="crash", function=crash, band=Band.TUNED
    )
    registry.load("rms_norm")
    monkeypatch.setitem(registry._implementations["rms_norm"], "crash", implementation)
    outcomes = list(check_all(CPU, operations=["rms_norm"], only="crash"))
    assert {o.detail for o in outcomes if o.status == "failed"} == {"RuntimeError: launch failed"}
    few = list(check_all(CPU, operations=["rms_norm"], only="crash", few=2))
    assert [o.case for o in few] == ["decode_1", "odd_width"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "--only", "tritn"], "implementation 'tritn' is in none of rms_norm; known: "),
        (["check", "--only", "reference"], "implementation 'reference' is in none of rms_norm"),
        (["check", "--case", "decode1"], "like it: decode_1"),
        (["bench", "--only", "tritn"], "implementation 'tritn' is in none of rms_norm"),
        (["bench", "--case", "decode1"], "like it: decode_1"),
    ],
)
def test_names_of_nothing_are_refused_not_passed_over(words, said, capsys):
    assert kernels_main([*words, "--device", "cpu", "rms_norm"]) == 2
    assert said in capsys.readouterr().err


def test_lines_go_to_a_file_in_folders_that_are_made(tmp_path, capsys):
    words = ["check", "--device", "cpu", "--few", "1", "--only", "torch", "rms_norm", "--json"]
    path = tmp_path / "new" / "r.jsonl"
    assert kernels_main([*words, str(path)]) == 0
    [line] = path.read_text().splitlines()
    assert json.loads(line)["status"] == "ok"
    assert kernels_main([*words, str(path / "x")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("few", ["0", "-1", "x"])
def test_a_check_of_no_cases_is_refused(few, capsys):
    with pytest.raises(SystemExit) as end:
        kernels_main(["check", "--device", "cpu", "--few", few, "rms_norm"])
    assert end.value.code == 2
    assert f"--few: {few!r} is no whole number of at least 1" in capsys.readouterr().err


def route_case(**sizes):
    return next(c for c in cases_module("moe_route").CASES if c.name == "ties")


def test_ties_to_the_wrong_expert_fail():
    def higher_id_first(x_TD, *, weights, expert_ids_TK, expert_weights_TK):
        logits_TE = x_TD @ weights.matrix.to_float().T + weights.bias_N
        best, ids = logits_TE.flip(-1).sort(dim=-1, descending=True, stable=True)
        chosen = expert_ids_TK.shape[1]
        expert_ids_TK.copy_(logits_TE.shape[1] - 1 - ids[:, :chosen])
        expert_weights_TK.copy_(best[:, :chosen].softmax(-1))

    found = outcome(higher_id_first, operation="moe_route", case=route_case())
    assert found.status == "failed"
    assert "expert_ids_TK" in found.detail
    assert "expert_weights_TK" not in found.detail


def test_an_attention_that_sees_one_token_too_many_fails():
    cases = {c.name: c for c in cases_module("attention_decode").CASES}
    module = __import__("rose.kernels.attention_decode.reference", fromlist=["reference"])

    def too_wide(
        q_SHD,
        kv_pages,
        page_table_SP,
        lengths_S,
        sinks_H,
        *,
        scale,
        window_tokens,
        max_length,
        out_SHD,
    ):
        module.reference(
            q_SHD,
            kv_pages,
            page_table_SP,
            lengths_S,
            sinks_H,
            scale=scale,
            window_tokens=window_tokens + 1,
            max_length=max_length,
            out_SHD=out_SHD,
        )

    for name, status in {
        "window_8_of_7": "ok",
        "window_8_of_8": "ok",
        "window_8_of_9": "failed",
    }.items():
        assert outcome(too_wide, operation="attention_decode", case=cases[name]).status == status


@pytest.mark.parametrize(
    ("formats", "other"),
    [
        (("fp8_group128", "fp8_group64"), None),
        (("fp8_token", "fp8_swiglu"), ("fp8_token", "fp8_group128")),
    ],
)
def test_rounded_activations_are_compared_with_a_reference_that_rounds_them(formats, other):
    cases = {c.name: c for c in cases_module("moe_experts").CASES}
    module = __import__("rose.kernels.moe_experts.reference", fromlist=["reference"])

    def quantising(
        x_TD,
        expert_ids_TK,
        expert_weights_TK,
        *,
        weights,
        swiglu_alpha,
        swiglu_limit,
        out_TD,
    ):
        module.rounded_reference(
            formats,
            x_TD,
            expert_ids_TK,
            expert_weights_TK,
            weights=weights,
            swiglu_alpha=swiglu_alpha,
            swiglu_limit=swiglu_limit,
            out_TD=out_TD,
        )

    options = {"operation": "moe_experts", "case": cases["bf16_by_fp8_block"]}
    assert outcome(quantising, activation_rounding=formats, **options).status == "ok"
    if other is not None:
        assert outcome(quantising, activation_rounding=other, **options).status == "failed"
    # Nobody may round in silence, nor declare a rounding that does not happen.
    assert outcome(quantising, **options).status == "failed"
    assert outcome(module.reference, activation_rounding=formats, **options).status == "failed"


def test_a_residual_that_is_the_output_is_not_poisoned():
    case = next(c for c in cases_module("gemm").CASES if c.options["residual"] == "in_place")
    arguments = cases_module("gemm").inputs(case, 0, "cpu")
    assert arguments["residual_TN"] is arguments["out_TN"]
    copied = clone(arguments)
    assert copied["residual_TN"] is copied["out_TN"]
    assert copied["out_TN"] is not arguments["out_TN"]
    wanted = run_reference(registry.load("gemm"), case, arguments)["out_TN"]
    assert torch.isfinite(wanted).all()


def test_clones_share_nothing_and_keep_their_format():
    weights = LinearWeights(matrix=plain(torch.ones(2, 2)))
    copied = clone({"weights": weights})["weights"]
    copied.matrix.values.zero_()
    assert weights.matrix.values.sum() == 4
    assert copied.matrix.format == weights.matrix.format


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_poison_is_no_right_result(dtype):
    tensor = torch.zeros(3, dtype=dtype)
    poison(tensor)
    assert compare("out", tensor, torch.zeros(3, dtype=dtype), FLOAT32) is not None


def test_poisoned_e4m3_is_nan():
    tensor = torch.zeros(3, dtype=torch.float8_e4m3fn)
    poison(tensor)
    assert tensor.float().isnan().all()


def test_integers_compare_exactly_under_any_tolerance():
    loose = replace(FLOAT32, relative=1.0, absolute=1.0)
    assert compare("ids", torch.tensor([1, 2]), torch.tensor([1, 3]), loose) is not None
    assert compare("ids", torch.tensor([1.0, 2]), torch.tensor([1.0, 3]), loose) is None
    assert compare("ids", torch.tensor([1, 2]), torch.tensor([1, 2]), EXACT) is None


def test_one_rounding_to_bf16_is_within_its_tolerance_and_two_bits_less_are_not():
    numbers = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert compare("out", numbers.bfloat16(), numbers, BF16_OUT) is None
    # Six bits of mantissa instead of eight.
    coarse = (numbers.view(torch.int32) & ~((1 << 18) - 1)).view(torch.float32)
    assert compare("out", coarse, numbers, BF16_OUT) is not None


def test_only_triton_kernels_are_interpreted_and_only_in_dtypes_that_work():
    def refusal(**details):
        implementation = Implementation(
            operation="rms_norm", name="tried", band=Band.TUNED, device="cuda", **details
        )
        return is_runnable(implementation, CASE, CPU, interpret=True)

    kernel = type("", (), {"__module__": "rose.kernels.rms_norm.triton_impl"})()
    assert refusal(function=right) == "no Triton kernel"
    assert refusal(function=kernel) is None
    assert "not right for float32" in refusal(function=kernel, interpreted=frozenset())
    bf16 = Case(name="bf16", sizes=CASE.sizes, formats={"activation": "bf16"})
    implementation = Implementation(
        operation="rms_norm", name="tried", function=kernel, band=Band.TUNED, device="cuda"
    )
    assert "not right for bf16" in is_runnable(implementation, bf16, CPU, interpret=True)


def test_large_cases_wait_for_a_gpu():
    large = replace(CASE, large=True)
    implementation = Implementation(
        operation="rms_norm", name="tried", function=right, band=Band.TUNED
    )
    assert is_runnable(implementation, large, CPU) == "large case, left out on a CPU"
    cuda = DeviceFacts(kind="cuda", name="H200", capability=(9, 0))
    assert is_runnable(implementation, large, cuda) is None
