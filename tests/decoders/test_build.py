"""The kernel table that a server shows at its start, in words for who runs it."""

from __future__ import annotations

import pytest

from rose.decoders.build import UNFUSED, _by_implementation
from rose.kernels import registry
from rose.kernels.registry import REGIMES


def test_an_implementation_of_all_regimes_is_bound_everywhere():
    assert _by_implementation([("gemm", str(r), "torch") for r in REGIMES]) == [
        ("gemm", "torch", "everywhere")
    ]


def test_regimes_are_told_in_words():
    table = [("gemm", str(r), f"kernel_{i}") for i, r in enumerate(REGIMES)]
    assert [words for _, _, words in _by_implementation(table)] == [
        "decode of 1 to 16 sequences",
        "decode of 17 to 48 sequences",
        "decode of 49 to 256 sequences",
        "decode of 257 to 512 sequences",
        "prefill of 1 to 2048 tokens",
        "prefill of 2049 or more tokens",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cuda_stack", "decode of 1 sequence"),
        ("blocks", "decode of 1 sequence: layer by layer, as other steps"),
        (
            "blocks (cuda_stack: needs 15 clusters (of 8))",
            "decode of 1 sequence: layer by layer, as other steps",
        ),
    ],
)
def test_a_fusion_whose_parts_run_is_told_as_such_and_keeps_the_reason(name, words):
    [regime] = registry.load("decode_layers").regimes
    rows = _by_implementation([("decode_layers", str(regime), name)])
    assert rows == [("decode_layers", name, words)]


def test_the_name_of_what_runs_unfused_is_that_of_the_registry():
    names = {i.name for i in registry.implementations("decode_layers") if i.is_unfused}
    assert names == {UNFUSED}
