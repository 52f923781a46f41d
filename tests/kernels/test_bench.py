"""A benchmark checks first, says what it counted, and turns over the experts it times."""

from __future__ import annotations

import torch

from rose.kernels import registry
from rose.kernels.__main__ import main
from rose.kernels.bench import bench_all, time_case
from rose.kernels.check import Draw, cases_module, clone
from rose.kernels.registry import Band, Implementation
from rose.utils.device import CPU


def implementation(name: str) -> Implementation:
    return next(i for i in registry.implementations(name) if i.name == "torch")


def test_a_line_counts_work_and_time():
    case = cases_module("rms_norm").CASES[1]
    line = time_case(registry.load("rms_norm"), implementation("rms_norm"), case, CPU)
    assert line["case"] == "decode_128"
    assert line["flops"] == 4 * 128 * 2880
    assert line["bytes"] == 2880 * (4 * 2 * 128 + 4)
    assert 0 < line["p10_us"] <= line["median_us"] <= line["p90_us"]
    assert "share_of_limit" not in line  # a CPU's limits are not known


def test_what_is_wrong_is_not_timed(monkeypatch):
    def wrong(x_TD, weight_D, *, eps, residual_TD, out_TD):
        out_TD.zero_()

    registry.load("rms_norm")
    tried = Implementation(operation="rms_norm", name="wrong", function=wrong, band=Band.TUNED)
    monkeypatch.setitem(registry._implementations["rms_norm"], "wrong", tried)
    lines = list(bench_all(CPU, operations=["rms_norm"], case_name="decode_1"))
    errors = {line["implementation"]: line.get("error", "") for line in lines}
    assert errors["wrong"].startswith("wrong result: out_TD")
    assert errors["torch"] == ""


def test_rotation_moves_experts_and_keeps_foreign_ids():
    module = cases_module("moe_experts")
    case = next(c for c in module.CASES if c.name == "foreign_ids")
    arguments = module.inputs(case, 0, "cpu")
    ids_TK = arguments["expert_ids_TK"]
    moved_TK = module.rotated(case, arguments, 1)["expert_ids_TK"]
    assert torch.equal(moved_TK < 0, ids_TK < 0)
    assert torch.equal(moved_TK[ids_TK >= 0], (ids_TK[ids_TK >= 0] + 2) % 8)
    assert moved_TK.dtype == torch.int32
    assert torch.equal(module.rotated(case, arguments, 0)["expert_ids_TK"], ids_TK)


def test_copies_keep_rows_that_lie_apart():
    module = cases_module("attention_decode")
    case = next(c for c in module.CASES if c.name == "strided")
    arguments = module.inputs(case, 0, "cpu")
    copied = clone(arguments)
    assert not arguments["q_SHD"].is_contiguous()
    assert copied["q_SHD"].stride() == arguments["q_SHD"].stride()
    assert torch.equal(copied["q_SHD"], arguments["q_SHD"])


def test_a_draw_computes_each_reference_once(monkeypatch):
    case = next(c for c in cases_module("rms_norm").CASES if c.name == "small")
    draw = Draw(registry.load("rms_norm"), case, 0, CPU)
    assert draw.wanted(()) is draw.wanted(())
    first, second = draw.fresh(), draw.fresh()
    assert first["x_TD"] is not second["x_TD"]
    assert torch.equal(first["x_TD"], second["x_TD"])


def test_an_operation_of_which_nothing_is_timed_here_is_said(capsys):
    assert main(["bench", "decode_layers", "--device", "cpu"]) == 1
    told = capsys.readouterr().out
    assert told.startswith("decode_layers: nothing is timed here: ")
    assert "cuda_stack: large case, left out on a CPU" in told
    words = ["bench", "decode_layers", "rms_norm", "--case", "decode_1", "--device", "cpu"]
    assert main(words) == 0
    *timed, told = capsys.readouterr().out.splitlines()
    assert all(line.startswith("rms_norm/") for line in timed)
    assert timed
    assert told.startswith("decode_layers: nothing is timed here: ")
