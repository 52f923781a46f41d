"""The made-up steps are steps that a model can run, on the pages there are."""

from __future__ import annotations

import pytest

from fakes.model import FakeModel
from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig
from rose.config.scheduler import SchedulerConfig
from rose.engine.engine import LLMEngine
from rose.runtime.warm_up import warm_up_steps


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize(("pages", "budget"), [(1, 8), (2, 8), (8, 64), (32, 256)])
def test_every_made_up_step_runs(pages, budget, has_graphs):
    model = FakeModel()
    engine = LLMEngine.from_model(
        model,
        EngineConfig(
            model="fake",
            device="cpu",
            cache=CacheConfig(page_tokens=16, kv_tokens=16 * max(2, pages)),
            scheduler=SchedulerConfig(
                max_step_tokens=budget, max_mixed_tokens=budget, max_sequences=4
            ),
        ),
    )
    steps = list(
        warm_up_steps(
            engine.table.layout,
            num_pages=pages,
            num_slots=4,
            max_tokens=min(budget, 16 * pages),
            has_graphs=has_graphs,
        )
    )
    for plan in steps:
        result = engine.decoder.collect(engine.decoder.launch(plan))
        assert list(result.token_ids) == plan.sample_slots
    alone = [len(s.decode) for s in steps if not s.prefill]
    beside = [len(s.decode) for s in steps if s.prefill and s.decode]
    assert beside == ([1, 2, 3] if pages > 1 else [])
    assert alone == ([1, 2, 4] if pages > 1 and not has_graphs else [])
