"""The accuracy run finds our model close to the reference, and a wrong model far from it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from rose.bench.accuracy import measure, prefill_kernels, prefill_rounding, run_accuracy
from rose.bench.build import setup
from rose.bench.ratios import ratios
from rose.kernels.quantize_activation.reference import rounded
from rose.kernels.registry import REGIMES, SHORT_PREFILL, KernelRow
from rose.layers.build import LayerBuild
from rose.models.gpt_oss.model import GptOss
from rose.models.gpt_oss.synthetic import synthetic_parameters


def test_the_served_model_is_the_reference_in_float32(tmp_path):
    line = run_accuracy(
        tokens=200, decoded=4, seed=1, path=tmp_path / "r.jsonl", commit="x",
        size="tiny", weights="mxfp4", device="cpu",
    )  # fmt: skip
    errors = line["relative_error_of_logits"]
    assert errors["prefill"] < 1e-5
    assert errors["decode_after_prefill"] < 1e-5
    assert 1e-4 < errors["pytorch_bf16"] < 0.2
    assert (tmp_path / "r.jsonl").read_text().count("\n") == 1


def test_kv_in_e4m3_is_the_reference_that_rounds_it(tmp_path):
    line = run_accuracy(
        tokens=100, decoded=4, seed=1, path=tmp_path / "r.jsonl", commit="x",
        size="tiny", weights="mxfp4", kv="fp8_e4m3", device="cpu",
    )  # fmt: skip
    assert "kv=fp8_e4m3" in line["config"]
    errors = line["relative_error_of_logits"]
    assert errors["reference_kv_rounded"] > 1e-3
    # A few of some hundred thousand numbers lie so close to the middle that float32 sums decide.
    assert errors["prefill_against_rounded"] < errors["reference_kv_rounded"] / 10
    assert errors["decode_against_rounded"] < errors["decode_after_prefill"] / 10
    # PyTorch in bf16 is no nearer to a reference that rounds KV, when it rounds KV too: bits of bf16 decide where.
    assert errors["pytorch_bf16_kv_rounded"] > errors["pytorch_bf16"] / 2
    found = ratios(errors)
    assert found["prefill"] == errors["prefill_against_rounded"] / errors["pytorch_bf16_kv_rounded"]
    assert found["decode"] == (
        errors["decode_against_rounded"] / errors["pytorch_bf16_kv_rounded_last_tokens"]
    )


def test_ratios_compare_with_the_reference_that_rounds_as_the_kernels_do():
    errors = {
        "pytorch_bf16": 2.0,
        "pytorch_bf16_last_tokens": 4.0,
        "prefill": 9.0,
        "decode_after_prefill": 6.0,
    }
    assert ratios(errors) == {"prefill": 4.5, "decode": 1.5}
    assert ratios({**errors, "prefill_against_rounded": 1.0}) == {"prefill": 0.5, "decode": 1.5}


def test_sinks_left_out_are_seen():
    bench = setup(size="tiny", weights="mxfp4", device="cpu")
    right = synthetic_parameters(bench.model_config, bench.config.quant, device="cpu", seed=0)
    layers = tuple(replace(p, sinks_H=p.sinks_H - 50) for p in right.layers)
    model = GptOss(
        bench.model_config,
        replace(right, layers=layers),
        build=LayerBuild(quant=bench.config.quant, device=bench.device),
        page_tokens=64,
        num_positions=128,
    )
    errors = measure(model, right, num_tokens=100, num_decoded=2, rounding=None, seed=1)
    assert errors["prefill"] > 1e-3


def test_the_rounding_of_the_experts_is_that_of_the_kernel_which_takes_so_many_tokens():
    table = [
        KernelRow("moe_experts", SHORT_PREFILL, "cuda_swapped"),
        KernelRow("moe_experts", REGIMES[-1], "cuda_wide"),
    ]
    model = SimpleNamespace(kernel_table=lambda: table)
    assert prefill_kernels(model, 2048) == {"moe_experts": "cuda_swapped"}
    assert prefill_rounding(model, 2048) == ("fp8_group128", "fp8_group128")
    assert prefill_kernels(model, 2049) == {"moe_experts": "cuda_wide"}
    assert prefill_rounding(model, 2049) == ("fp8_token", "fp8_swiglu")


def test_a_token_with_one_scale_is_rounded_as_one_group_of_all_its_columns():
    x_TD = torch.randn(5, 300, generator=torch.Generator().manual_seed(3)) * 2
    scale_T1 = x_TD.abs().amax(dim=1, keepdim=True) / 448
    wanted_TD = (x_TD / scale_T1).to(torch.float8_e4m3fn).float() * scale_T1
    assert torch.equal(rounded(x_TD, "fp8_token"), wanted_TD)
    assert not torch.equal(rounded(x_TD, "fp8_group128"), wanted_TD)
