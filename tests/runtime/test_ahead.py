"""Lists are told apart by what kernels depend on, and only a start on a GPU compiles one."""

from __future__ import annotations

import threading

from rose.config.engine import EngineConfig
from rose.config.quant import QuantConfig
from rose.kernels.ahead import find_list
from rose.models.gpt_oss.checkpoints import configuration
from rose.runtime.ahead import begin_ahead, list_facts
from rose.utils.device import CPU, H200


def _quant(**choices):
    config = EngineConfig(model="x", device="cuda", quant=QuantConfig(**choices))
    return config.resolve(H200, checkpoint_format="mxfp4").quant


def test_the_published_sizes_have_a_list_with_either_kv():
    found = {
        (size, kv): find_list(list_facts(configuration(size), _quant(kv=kv)))
        for size in ("20b", "120b")
        for kv in ("auto", "fp8_e4m3")
    }
    assert all(len(kernels) > 40 for kernels in found.values())
    assert len(set(found.values())) == 4


def test_other_formats_and_sizes_have_none():
    assert find_list(list_facts(configuration("20b"), _quant(weights="bf16"))) == ()
    assert find_list(list_facts(configuration("tiny"), _quant())) == ()


def test_layers_and_contexts_make_no_other_list():
    assert list_facts(configuration("20b"), _quant()) == list_facts(
        configuration("20b", num_layers=2), _quant()
    )


def test_nothing_is_compiled_ahead_without_a_gpu():
    config = EngineConfig(model="x", device="cpu").resolve(CPU, checkpoint_format="mxfp4")
    begun = begin_ahead(configuration("20b"), config, CPU)
    assert begun.kernels == ()
    assert not [t for t in threading.enumerate() if t.name == "ahead"]
