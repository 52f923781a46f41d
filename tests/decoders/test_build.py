"""The kernel table that a server shows at its start, in words for who runs it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose.config.engine import KernelsConfig
from rose.config.quant import QuantConfig
from rose.decoders.build import _by_implementation
from rose.kernels import registry
from rose.kernels.registry import REGIMES, KernelRow
from rose.layers.build import LayerBuild


def test_an_implementation_of_all_regimes_is_bound_everywhere():
    assert _by_implementation([KernelRow("gemm", r, "torch") for r in REGIMES]) == [
        ("gemm", "torch", "everywhere")
    ]


def test_regimes_are_told_in_words():
    table = [KernelRow("gemm", r, f"kernel_{i}") for i, r in enumerate(REGIMES)]
    assert [words for _, _, words in _by_implementation(table)] == [
        "decode of 1 sequence",
        "decode of 2 to 16 sequences",
        "decode of 17 to 48 sequences",
        "decode of 49 to 256 sequences",
        "decode of 257 to 512 sequences",
        "prefill of 1 to 2048 tokens",
        "prefill of 2049 or more tokens",
    ]


@pytest.mark.parametrize(
    ("row", "name", "words"),
    [
        ({}, "anything", "decode of 1 sequence"),
        ({"is_unfused": True}, "anything", "decode of 1 sequence: layer by layer, as other steps"),
        (
            {"is_unfused": True, "refused_here": "cuda_stack: needs all (of 120)"},
            "anything (cuda_stack: needs all (of 120))",
            "decode of 1 sequence: layer by layer, as other steps",
        ),
    ],
)
def test_a_fusion_whose_parts_run_is_told_as_such_and_keeps_the_reason(row, name, words):
    [regime] = registry.load("decode_layers").regimes
    rows = _by_implementation([KernelRow("decode_layers", regime, "anything", **row)])
    assert rows == [("decode_layers", name, words)]


def test_what_runs_unfused_is_told_whatever_its_name(monkeypatch):
    unfused = next(i for i in registry.implementations("decode_layers") if i.is_unfused)
    named = replace(unfused, name="one_by_one")
    monkeypatch.setattr(registry, "implementations", lambda _name: [named])
    quant = QuantConfig(weights="float32", activations="float32", kv="float32")
    for is_invariant in (False, True):
        build = LayerBuild(quant=quant, kernels=KernelsConfig(batch_invariant=is_invariant))
        weights = {"projection": "float32", "weight": "float32"}
        sizes = dict.fromkeys(registry.load("decode_layers").sizes, 16)
        assert build.bind_fusion("decode_layers", sizes=sizes, weights=weights) is None
        [(_, name, words)] = _by_implementation(build.kernel_table())
        assert (name, words.partition(": ")[2]) == ("one_by_one", "layer by layer, as other steps")
