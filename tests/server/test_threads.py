"""The embedded model is run with one thread on a CPU: on busy cores more are many times slower."""

from __future__ import annotations

from pathlib import Path

import torch

import rose
from rose import EngineConfig, LLMEngine
from rose.utils.threads import fit_threads


def test_the_embedded_model_gets_one_thread():
    folder = Path(rose.__file__).parent / "assets" / "tiny-gpt-oss"
    before = torch.get_num_threads()
    try:
        engine = LLMEngine.from_config(EngineConfig(model=str(folder), device="cpu"))
        torch.set_num_threads(2)
        fit_threads(engine.model.weight_bytes, "cpu")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
