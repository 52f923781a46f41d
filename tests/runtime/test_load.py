"""A checkpoint folder becomes an engine, or the reason why not."""

from __future__ import annotations

import json
import logging

import pytest

from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig, KernelsConfig
from rose.config.parallel import ParallelConfig
from rose.config.scheduler import SchedulerConfig
from rose.engine.engine import LLMEngine
from rose.kernels import invariant, invariant_attention
from rose.models.gpt_oss.checkpoints import configuration, synthesise
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams
from rose.runtime.load import find_architecture, load_model
from rose.utils.device import CPU
from rose.utils.errors import CheckpointError, ConfigError, ContractError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    synthesise(path, configuration("tiny", num_layers=2), seed=0, format_name="mxfp4")
    return path


def _config(folder, **changes):
    return EngineConfig(
        model=str(folder),
        device="cpu",
        cache=CacheConfig(kv_tokens=256),
        scheduler=SchedulerConfig(max_step_tokens=64, max_mixed_tokens=64, max_sequences=4),
        **changes,
    )


def test_a_checkpoint_answers_through_the_engine(folder):
    details = []
    engine = LLMEngine.from_config(_config(folder), report=details.append)
    request = Request(
        request_id="r",
        prompt_token_ids=list(range(80)),
        max_tokens=3,
        sampling=SamplingParams(temperature=0),
    )
    [output] = engine.generate([request])
    assert len(output.token_ids) == 3
    assert any(d.startswith("loading weights:") for d in details)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallel": ParallelConfig(tp=2)}, "tp=2.*runs on one device"),
        ({"context_tokens": 200_000}, "context_tokens=200000; the model takes 131072"),
    ],
)
def test_what_this_engine_cannot_do_is_refused_before_loading(folder, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        load_model(_config(folder, **changes), CPU, lambda _: None)


@pytest.mark.parametrize(
    ("only", "reason"),
    [
        ({"gemm": "no_such"}, "gemm=no_such: no such implementation; known: .*reference"),
        ({"gem": "torch"}, "gem; known operations: .*gemm"),
    ],
)
def test_unknown_kernels_are_refused_before_loading(folder, only, reason):
    told = []
    with pytest.raises(ContractError, match=reason):
        load_model(_config(folder, kernels=KernelsConfig(only=only)), CPU, told.append)
    assert not told


@pytest.mark.parametrize(
    ("values", "error", "reason"),
    [
        ({"model_type": "llama"}, ConfigError, "'llama' is not known; supported: gpt_oss"),
        ({"hidden_size": 4}, CheckpointError, "has no model_type"),
    ],
)
def test_an_unknown_architecture_is_named(tmp_path, values, error, reason):
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(error, match=reason):
        find_architecture(tmp_path)


def test_the_original_layout_is_gpt_oss(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 4, "swiglu_limit": 7.0}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert find_architecture(tmp_path).architecture == "gpt_oss"


def test_a_machine_that_cannot_be_batch_invariant_serves_without_it_unless_asked(
    folder, monkeypatch, caplog
):
    monkeypatch.setattr(
        invariant, "equal_rows_problem", lambda *_: "products give a row other bits"
    )
    monkeypatch.setattr(invariant_attention, "equal_rows_problem", invariant.equal_rows_problem)
    with caplog.at_level(logging.WARNING):
        loaded = load_model(_config(folder), CPU, lambda _: None)
    assert loaded.config.kernels.batch_invariant is False
    assert "attention_prefill, attention_decode have no implementation" in caplog.text
    kernels = KernelsConfig(batch_invariant=True)
    with pytest.raises(ConfigError, match=r"kernels.batch_invariant was asked for on cpu"):
        load_model(_config(folder, kernels=kernels), CPU, lambda _: None)
