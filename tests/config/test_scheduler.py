"""Budgets of a step: what is given stays, what is not depends on the device."""

from __future__ import annotations

import pytest

from rose.config.engine import EngineConfig
from rose.config.scheduler import SchedulerConfig
from rose.utils.device import CPU


def test_a_cpu_gets_chunks_that_keep_a_step_under_a_second():
    resolved = EngineConfig(model="m").resolve(CPU, checkpoint_format="bf16").scheduler
    assert (resolved.max_step_tokens, resolved.max_mixed_tokens) == (1024, 512)
    gpu = SchedulerConfig().resolve("cuda")
    assert (gpu.step_tokens, gpu.mixed_tokens) == (16384, 4096)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_was_asked_for_stays(device):
    given = SchedulerConfig(max_step_tokens=5000, max_sequences=2000).resolve(device)
    assert given.step_tokens == 5000
    assert given.mixed_tokens == (2000 if device == "cpu" else 4096)
