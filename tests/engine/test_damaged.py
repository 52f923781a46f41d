"""A model whose logits are not finite: the requests that meet it end with an error, and nothing else does."""

from __future__ import annotations

import logging

import pytest
import torch

from fakes.model import FakeModel, expected_output
from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig
from rose.config.scheduler import SchedulerConfig
from rose.engine.engine import LLMEngine, RequestRefused
from rose.protocol.event import ErrorEvent, FinishedEvent, TokensEvent
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams

PROMPTS = {"good": [3, 1, 4], "bad": [15, 9, 2, 6], "later": [5, 3]}
OUTPUTS = {name: expected_output(prompt, 12) for name, prompt in PROMPTS.items()}
SICK = next(t for t in OUTPUTS["bad"][4:] if t not in OUTPUTS["good"] + OUTPUTS["later"])
NUM_SOUND = OUTPUTS["bad"].index(SICK)


class DamagedModel(FakeModel):
    """Gives `damage` for the logits wherever one token should follow."""

    def __init__(self, damage, sick=SICK):
        super().__init__()
        self.damage, self.sick = damage, sick

    def forward(self, token_ids_T, context):
        assert (token_ids_T >= 0).all(), "an embedding has no row for it"
        return super().forward(token_ids_T, context)

    def logits(self, hidden_SD):
        logits_SV = super().logits(hidden_SD)
        is_sick_S = logits_SV.argmax(dim=-1) == self.sick
        return logits_SV.masked_fill(is_sick_S.unsqueeze(1), self.damage)


def _engine(model, *, is_overlapped, budget=64):
    return LLMEngine.from_model(
        model,
        EngineConfig(
            model="fake",
            device="cpu",
            cache=CacheConfig(page_tokens=16, kv_tokens=1024),
            scheduler=SchedulerConfig(max_step_tokens=budget, max_mixed_tokens=32, max_sequences=8),
        ),
        is_overlapped=is_overlapped,
    )


def _request(name, **sampling):
    sampling = {"temperature": 0.0, **sampling}
    return Request(
        request_id=name,
        prompt_token_ids=PROMPTS[name],
        max_tokens=12,
        sampling=SamplingParams(**sampling),
    )


def _run(engine, *, late="later"):
    """Return tokens and last event by request; one request comes while the sick row's next step is in flight."""
    tokens, last = {name: [] for name in PROMPTS}, {}
    engine.add(_request("good"))
    engine.add(_request("bad"))
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokensEvent):
                tokens[event.request_id] += event.token_ids
                if event.request_id == "bad" and len(tokens["bad"]) == NUM_SOUND:
                    engine.add(_request(late))
            else:
                last[event.request_id] = event
    return tokens, last


@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_only_the_request_that_meets_them_ends_with_an_error(damage, is_overlapped, caplog):
    engine = _engine(DamagedModel(damage), is_overlapped=is_overlapped)
    with caplog.at_level(logging.ERROR):
        tokens, last = _run(engine)
    assert tokens == {**OUTPUTS, "bad": OUTPUTS["bad"][:NUM_SOUND]}
    assert isinstance(last["good"], FinishedEvent)
    assert isinstance(last["later"], FinishedEvent)
    error = last["bad"]
    assert isinstance(error, ErrorEvent)
    assert error.code == "logits_not_finite"
    assert f"after {NUM_SOUND} tokens of output" in error.message
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert told == [f"request bad ends: {error.message}"]
    assert engine.status().num_damaged == 1
    assert not engine.running_ids()
    assert engine.table.num_used_pages == 0


def test_penalties_and_logprobs_survive_a_row_without_a_token():
    engine = _engine(DamagedModel(torch.nan), is_overlapped=True)
    engine.add(_request("bad", logprobs=2, presence_penalty=1e-6))
    events = []
    while engine.has_work:
        events += engine.step()
    assert [e.token_ids for e in events[:-1]] == [[t] for t in OUTPUTS["bad"][:NUM_SOUND]]
    assert events[-1].code == "logits_not_finite"


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_model_that_gives_nothing_else_is_refused_at_the_start(is_overlapped):
    model = DamagedModel(torch.nan)
    model.logits = lambda hidden_SD: torch.full((len(hidden_SD), 97), torch.nan)
    engine = _engine(model, is_overlapped=is_overlapped)
    with pytest.raises(RequestRefused, match="no finite logits after 0 tokens of output"):
        engine.measure_steps()
