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
@pytest.mark.parametrize(
    ("pages", "budget", "slots"), [(1, 8, 4), (2, 8, 4), (8, 64, 4), (32, 256, 4), (8, 64, 1)]
)
def test_every_made_up_step_runs(pages, budget, slots, has_graphs):
    model = FakeModel()
    engine = LLMEngine.from_model(
        model,
        EngineConfig(
            model="fake",
            device="cpu",
            cache=CacheConfig(page_tokens=16, kv_tokens=16 * max(2, pages)),
            scheduler=SchedulerConfig(
                max_step_tokens=budget, max_mixed_tokens=budget, max_sequences=slots
            ),
        ),
    )
    steps = list(
        warm_up_steps(
            engine.table.layout,
            num_pages=pages,
            num_slots=slots,
            max_tokens=min(budget, 16 * pages),
            has_graphs=has_graphs,
        )
    )
    for plan in steps:
        result = engine.decoder.collect(engine.decoder.launch(plan))
        assert list(result.token_ids) == plan.sample_slots
    alone = [len(s.decode) for s in steps if not s.prefill]
    beside = [len(s.decode) for s in steps if s.prefill and s.decode]
    has_two = pages > 1 and slots > 1
    assert beside == ([1, 2, 3] if has_two else [])
    decoding = [1, 2, 4] if has_two else [1]
    assert alone == ([] if has_graphs else decoding), "one sequence alone decodes too"
