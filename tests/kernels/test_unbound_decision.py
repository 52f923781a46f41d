"""The benchmark that decides on the unbound E4M3 experts: what it runs, what it rules out, what it concludes."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path

import pytest
import torch

from fakes import decode_experts
from rose.kernels import build
from rose.kernels.moe_experts.cuda_decode_calls import Launch
from rose.kernels.moe_experts.reference import reference, swiglu
from rose.utils.device import DeviceFacts

H200 = DeviceFacts(kind="cuda", name="H200", capability=(9, 0))
WIDE, NARROW = Launch(width=8, warps=16), Launch(width=8, warps=12)


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    found = importlib.import_module("decode_unbound")
    monkeypatch.setattr(found.common, "D", 64)
    monkeypatch.setattr(found.common, "INNER", 32)
    monkeypatch.setitem(found.EXPERTS, "20b", 4)
    return found


class Experts:
    """By the formula. `flaw`: in which run of all (from 0) one number of the output rows is off by a little."""

    def __init__(self, *, flaw: int = -1, is_wrong: bool = False) -> None:
        self.left, self.is_wrong = flaw, is_wrong

    def launch(self, _shape, *, out_TD, **arguments):
        reference(out_TD=out_TD, **arguments)
        if self.is_wrong:
            out_TD[0, 0] += 1

    def gate_up(self, _shape, x_TD, ids_TK, weights, act_PI, *, alpha, limit):
        tokens = torch.arange(len(x_TD)).repeat_interleave(ids_TK.shape[1])
        for pair, expert in enumerate(ids_TK.flatten().tolist()):
            row = weights.gate_up[expert].to_float() @ x_TD[tokens[pair]].float()
            act_PI[pair] = swiglu(row + weights.gate_up_bias_EF[expert], alpha=alpha, limit=limit)

    def down(self, _shape, act_PI, ids_TK, weights, y_PD):
        for pair, expert in enumerate(ids_TK.flatten().tolist()):
            y_PD[pair] = weights.down[expert].to_float() @ act_PI[pair].float()
        y_PD[0, 0] *= 1 + 1e-6 * (self.left == 0)
        self.left -= 1


def _decide(script, monkeypatch, tmp_path, kinds, *, seconds=100.0, batches=(2,)):
    """`kinds`: (name, experts, shape, microseconds), the bound one first."""
    us = {(name, shape): us for name, _, shape, us in kinds}
    monkeypatch.setattr(script, "TURNS", 4)
    found = [script.Contender(name, experts, shape) for name, experts, shape, _ in kinds]
    monkeypatch.setattr(script, "contenders", lambda *_: iter(found))
    by_config = {c.config: us[c.name, c.shape] for c in found}

    def clock(call, copies):
        call(copies - 1)
        return by_config[call.__defaults__[0].config]

    args = argparse.Namespace(
        batches=batches, out=tmp_path / "lines.jsonl", deadline=time.time() + seconds
    )
    machine = script.Machine(device="cpu", facts=H200, time=clock)
    decisions = script.decide("20b", args, machine)
    lines = [json.loads(line) for line in args.out.read_text().splitlines()]
    return decisions, lines


def test_the_fastest_right_shape_is_held_against_what_is_bound(
    script, monkeypatch, tmp_path, capsys
):
    kinds = [
        ("bound ring", Experts(), Launch(), 100.0),
        ("e4m3", Experts(), WIDE, 96.0),
        ("e4m3", Experts(), NARROW, 90.0),
    ]
    (decision,), lines = _decide(script, monkeypatch, tmp_path, kinds)
    assert (decision.verdict, decision.best) == ("bind", script.Contender(*kinds[2][:3]).config)
    assert decision.gain == pytest.approx(0.1)
    ops = [line["op"] for line in lines]
    assert ops == ["repeat_20b"] * 3 + ["moe_20b"] * 3 + ["decide_20b"]
    assert all(line["runs"] == 16 and line["different_y"] == 0 for line in lines[:3])
    assert lines[3]["rounds_us"] == [100.0, 100.0]
    assert lines[-1]["verdict"] == "bind"
    assert "20b: bind E4M3 from 2 tokens on" in capsys.readouterr().out


def test_a_shape_that_differs_once_is_out_however_fast(script, monkeypatch, tmp_path, capsys):
    kinds = [
        ("bound ring", Experts(), Launch(), 100.0),
        ("e4m3", Experts(), WIDE, 99.0),
        ("e4m3", Experts(flaw=13), NARROW, 50.0),
    ]
    (decision,), lines = _decide(script, monkeypatch, tmp_path, kinds)
    assert decision.wrong == (script.Contender(*kinds[2][:3]).config,)
    assert [line.get("different_y") for line in lines[:3]] == [0, 0, 1]
    assert decision.best_us == 99.0
    assert decision.verdict == "keep", "1 % is noise"
    out = capsys.readouterr().out
    assert "WRONG: e4m3" in out
    assert "20b: keep what is bound" in out


def test_what_the_reference_refuses_is_neither_repeated_nor_timed(script, monkeypatch, tmp_path):
    kinds = [
        ("bound ring", Experts(), Launch(), 100.0),
        ("e4m3", Experts(is_wrong=True), WIDE, 50.0),
    ]
    (decision,), lines = _decide(script, monkeypatch, tmp_path, kinds)
    assert "error" in lines[1]
    assert decision.best is None
    assert decision.verdict == "keep"


def test_a_wrong_bound_kernel_is_said_first(script, monkeypatch, tmp_path):
    kinds = [
        ("bound ring", Experts(flaw=5), Launch(), 100.0),
        ("e4m3", Experts(), WIDE, 50.0),
    ]
    (decision,), _ = _decide(script, monkeypatch, tmp_path, kinds)
    assert decision.verdict == "what is bound is wrong"


def test_without_time_nothing_is_decided(script, monkeypatch, tmp_path):
    kinds = [("bound ring", Experts(), Launch(), 100.0), ("e4m3", Experts(), WIDE, 50.0)]
    (decision,), _ = _decide(script, monkeypatch, tmp_path, kinds, seconds=-1.0)
    assert decision.verdict == "no time"
    assert decision.late == 2


@pytest.mark.slow
def test_the_kernel_itself_goes_through_it_on_a_cpu(script, monkeypatch, tmp_path):
    unbound = Path(script.e4m3.__file__).parent.glob("decode_e4m3*.cuh")
    host = decode_experts.compile_host(tmp_path, "host_e4m3.cpp", unbound)
    decode_experts.put_on_cpu(script.e4m3.EXPERTS, host, monkeypatch)
    monkeypatch.setattr(script.common, "D", 320)
    monkeypatch.setattr(script.common, "INNER", 320)
    kinds = [
        ("bound ring", Experts(), Launch(), 100.0),
        ("e4m3", script.e4m3.EXPERTS, Launch(width=16, warps=4, stages=2), 90.0),
    ]
    (decision,), lines = _decide(script, monkeypatch, tmp_path, kinds)
    assert decision.verdict == "bind", lines
    assert lines[1]["runs"] == 16


def test_it_is_bound_from_where_it_never_loses_again(script):
    def decision(batch, us):
        return script.Decision(
            batch=batch, bound="ring", bound_us=100.0, best="e4m3", best_us=us, wrong=(), late=0
        )

    found = [decision(32, 90.0), decision(64, 99.0), decision(96, 95.0), decision(128, 90.0)]
    assert "bind E4M3 from 96 tokens on" in script.table("120b", found)
    assert "keep what is bound" in script.table("120b", [*found, decision(256, 120.0)])


@pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")
def test_what_is_bound_on_hopper_comes_first(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("decode_unbound")
    for model, wanted in (("20b", "bound ring"), ("120b", "bound stream")):
        for batch in script.BATCHES:
            first, *others = script.contenders(model, batch, H200)
            assert first.name == ("bound stream" if batch == 32 else wanted)
            assert {c.name for c in others} == {"e4m3"}
            assert {c.shape for c in others} <= set(script.e4m3.SHAPES)
