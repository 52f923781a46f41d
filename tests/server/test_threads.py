"""The embedded model is run with one thread on a CPU, whoever builds its engine: more are many times slower."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rose
from rose import EngineConfig, LLMEngine
from rose.bench.build import build, setup
from rose.utils.device import CPU, H200
from rose.utils.threads import ONE_THREAD_BYTES, fit_threads

EMBEDDED = Path(rose.__file__).parent / "assets" / "tiny-gpt-oss"


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_an_engine_of_the_embedded_model_gets_one_thread_and_says_so(caplog):
    with caplog.at_level("INFO"):
        LLMEngine.from_config(EngineConfig(model=str(EMBEDDED), device="cpu"))
    assert torch.get_num_threads() == 1
    assert "on a CPU: one thread for this process (torch.set_num_threads for more)" in caplog.text


def test_a_bench_of_a_small_model_gets_one_thread_too():
    build(setup(size="tiny", weights="mxfp4", device="cpu", layers=1, kv_tokens=1024))
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("num_bytes", "device"), [(ONE_THREAD_BYTES, CPU), (ONE_THREAD_BYTES - 1, H200)]
)
def test_large_models_and_gpus_keep_their_threads(num_bytes, device):
    fit_threads(num_bytes, device)
    assert torch.get_num_threads() == 2
