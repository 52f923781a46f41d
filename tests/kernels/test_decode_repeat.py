"""The benchmark that runs decode experts again and again: a bit that differs once is counted."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from rose.kernels.moe_experts import cases
from rose.kernels.moe_experts.cuda_decode_calls import Launch

SIZES = {"D": 64, "I": 32, "E": 4, "K": 2}


class Experts:
    """`flaw`: in which run of all (from 0) the last bit of one output number is another."""

    def __init__(self, flaw: int) -> None:
        self.left = flaw

    def gate_up(self, _shape, _x_TD, _ids_TK, _weights, act_PI, *, alpha, limit):
        act_PI.fill_(alpha / limit)

    def down(self, _shape, act_PI, _ids_TK, _weights, y_PD):
        y_PD.copy_(act_PI.float().sum(1, keepdim=True).expand_as(y_PD))
        if self.left == 0:
            y_PD[1, 2] = torch.nextafter(y_PD[1, 2], torch.tensor(torch.inf))
        self.left -= 1


@pytest.mark.parametrize(("flaw", "differing"), [(-1, 0), (5, 1)])
def test_a_bit_that_differs_once_is_counted_and_told(monkeypatch, capsys, flaw, differing):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("decode_repeat")
    calls = [cases.inputs(cases.make_case("drawn", 3, SIZES), seed, "cpu") for seed in range(2)]
    contender = script.Contender("e4m3", Experts(flaw), Launch())
    assert script.differing(contender, calls, {}, turns=4) == {"act": 0, "y": differing}
    assert ("pair 1, " in capsys.readouterr().out) == (differing == 1)
