"""`rose demo` on the embedded model: a sum that is right, a call with the right arguments, its result in the answer."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from rose.cli.main import run
from rose.utils.device import detect


def test_the_demo_adds_calls_a_tool_and_uses_what_it_says(capsys, monkeypatch):
    monkeypatch.setenv("ROSE_API_KEY", "of-another-server")
    assert run(["demo"]) == 0
    said = capsys.readouterr().out
    assert "27 + 45 = 72." in said
    assert 'get_weather {"city":"Paris"}' in said
    assert "In Paris it is 21 °C and sunny." in said
    assert "tokens/s" in said
    assert ("an hour" in said) is (detect().kind == "cuda"), "the price is a GPU's"
