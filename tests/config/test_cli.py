"""Options come from the dataclasses alone and build the same tree."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Literal

import pytest

from rose.config import cli
from rose.config.engine import EngineConfig
from rose.config.quant import QuantConfig
from rose.utils.errors import ConfigError
from rose.utils.field_docs import field_docs


def _by_path(*roots, **keywords):
    return {option.path: option for option in cli.options(*roots, **keywords)}


def test_messages_get_the_flags_that_a_person_types():
    options = cli.options(EngineConfig)
    for text, worded in (
        ("x=1; change quant.weights", "x=1; change --weights (quant.weights)"),
        ("change context_tokens", "change --context-tokens"),
        (
            "raise cache.kv_tokens, or lower context_tokens or scheduler.max_step_tokens",
            "raise --kv-tokens (cache.kv_tokens), or lower --context-tokens or "
            "--max-step-tokens (scheduler.max_step_tokens)",
        ),
        ("context_tokens=5; change --port", "context_tokens=5; change --port"),
        ("change quant.weights_of", "change quant.weights_of"),
    ):
        assert cli.with_flags(text, options) == worded


def test_every_leaf_of_the_engine_tree_is_an_option():
    found = _by_path(EngineConfig)
    assert found["cache", "page_tokens"].flags == ("--page-tokens", "--cache.page-tokens")
    assert found["cache", "page_tokens"].kind is int
    assert found["cache", "kv_tokens"].kind is int
    assert found["use_graphs",].kind is bool
    assert found["kernels", "only"].is_mapping
    assert found["quant", "weights"].default == "auto"
    assert found["quant", "kv"].flags == ("--kv", "--quant.kv")
    assert "Limit below the model's own" in found["context_tokens",].help


def test_a_timeout_needs_no_unit_in_its_flag():
    @dataclass(frozen=True)
    class Patience:
        shutdown_timeout_s: float = 1.0
        linger_s: float = 2.0

    found = _by_path(Patience)
    assert found["shutdown_timeout_s",].flags == ("--shutdown-timeout-s", "--shutdown-timeout")
    assert found["linger_s",].flags == ("--linger-s",)


def test_skipped_leaves_are_left_out():
    assert ("model",) not in _by_path(EngineConfig, skip=frozenset({"model"}))


def test_a_short_flag_that_two_leaves_share_is_left_out():
    @dataclass(frozen=True)
    class A:
        size: int = 1

    @dataclass(frozen=True)
    class B:
        a: int = 2

    both = [("left", A, field(default_factory=A)), ("right", A, field(default_factory=A))]
    found = cli.options(make_dataclass("Pair", both), B)
    assert [option.flags for option in found] == [("--left.size",), ("--right.size",), ("--a",)]


def test_build_sets_what_was_given_and_keeps_the_rest():
    tree = cli.build(EngineConfig, {("model",): "m", ("cache", "page_tokens"): 32})
    assert tree.model == "m"
    assert tree.cache.page_tokens == 32
    assert tree.scheduler == EngineConfig(model="m").scheduler


def test_build_lists_the_problems_of_all_nodes():
    with pytest.raises(ConfigError) as caught:
        cli.build(
            EngineConfig, {("model",): "m", ("cache", "page_tokens"): 3, ("parallel", "tp"): 0}
        )
    assert len(caught.value.problems) == 2


def test_literal_and_tuple_fields_have_options():
    @dataclass(frozen=True)
    class Config:
        level: Literal["low", "high"] = "low"
        names: tuple[str, ...] = ()

    Config.__annotations__ = {"level": Literal["low", "high"], "names": tuple[str, ...]}
    found = _by_path(Config)
    assert found["level",].choices == ("low", "high")
    assert found["names",].is_repeated


def test_a_type_no_option_can_express_is_an_error():
    @dataclass(frozen=True)
    class Config:
        sets: set = field(default_factory=set)

    Config.__annotations__ = {"sets": set}
    with pytest.raises(TypeError, match="sets"):
        cli.options(Config)


def test_docs_below_fields_are_read():
    assert "mxfp4 keeps" in field_docs(QuantConfig)["weights"]
