"""Grammars through the whole engine, against a naive loop: batching, chunks, preemption, overlap, caches, graphs."""

from __future__ import annotations

import gc
import json
import random
import re
import threading
import time

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.grammars import (
    END,
    GO,
    NaiveFollower,
    constraint,
    text_of,
    text_tokens,
    tiny_vocabulary,
)
from fakes.graphs import use_eager_graphs
from fakes.model import VOCAB, FakeModel, expected_next, expected_output
from fakes.pages import check_pages, check_written, is_clean
from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig
from rose.config.scheduler import SchedulerConfig
from rose.engine.engine import LLMEngine
from rose.kernels.sample.reference import reference as sample
from rose.protocol.event import ErrorEvent, FinishedEvent, TokensEvent
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams
from rose.sampling.reference import adjusted

SETTINGS = [
    {},
    {"budget": 16},
    {"kv_tokens": 144},
    {"is_overlapped": True},
    {"is_overlapped": True, "kv_tokens": 144, "budget": 32},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["c", "f"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = f"%json {json.dumps(SCHEMA)}"
WORDS = "start: (/[a-c]{2,4}/) <[95]>"  # ends in the token that starts other grammars
KINDS = [
    constraint((f"start: {JSON} <[96]>", [[]])),
    None,
    constraint((f"start: {JSON} <[96]>", [[GO]]), banned=[END]),
    constraint((WORDS, [[]]), (f"start: {JSON} <[96]>", [[GO]]), banned=[END]),
    constraint(("start: /[0-9]{1,3}/ <[96]>", [text_tokens("a"), text_tokens("b"), [GO]])),
    constraint((WORDS, [[GO], text_tokens("x")]), banned=[END]),
    constraint((f"start: {JSON} <[96]>", []), banned=[GO, END], late=0, late_after=9),
]


def _engine(*, kv_tokens=1024, budget=64, sequences=8, is_overlapped=False, waiting=64):
    engine = LLMEngine.from_model(
        FakeModel(),
        EngineConfig(
            model="fake",
            device="cpu",
            cache=CacheConfig(page_tokens=16, kv_tokens=kv_tokens),
            scheduler=SchedulerConfig(
                max_step_tokens=budget,
                max_mixed_tokens=min(32, budget),
                max_sequences=sequences,
                max_waiting=waiting,
            ),
        ),
        is_overlapped=is_overlapped,
    )
    engine.learn(tiny_vocabulary())
    return engine


@pytest.fixture(autouse=True)
def one_thread():
    """Keep torch's threads from waiting for each other longer than they work on so few numbers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _requests(count=14, seed=0):
    generator = random.Random(seed)
    often = {GO: 3.0}
    kinds = [
        {},
        {"repetition_penalty": 1.7, "frequency_penalty": 0.3, "logit_bias": often},
        {"top_p": 0.8, "logit_bias": often},
        {"logit_bias": {5: 3.5, 6: -100.0, **often}, "logprobs": 2},
        {"top_k": 5, "logit_bias": often},
    ]
    return [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=[generator.randrange(VOCAB) for _ in range(generator.randint(1, 60))],
            max_tokens=45,
            sampling=SamplingParams(temperature=1.2, seed=i - 4, **kinds[i % len(kinds)]),
            stop_token_ids=[END],
            constraint=KINDS[i % len(KINDS)],
        )
        for i in range(count)
    ]


def _naive(request):
    """The tokens one by one, by the definitions alone."""
    sampling, output = request.sampling, []
    follower = NaiveFollower(request.constraint) if request.constraint is not None else None
    while len(output) < request.max_tokens and output[-1:] != [END]:
        known = request.prompt_token_ids + output
        logits = [0.0] * VOCAB
        logits[expected_next(known)] = 4.0
        logits = adjusted(
            logits,
            sampling,
            prompt_ids=request.prompt_token_ids,
            output_ids=output,
            stop_ids=[END],
        )
        allowed = follower.allowed(output) if follower is not None else range(VOCAB)
        logits = [logit if i in allowed else float("-inf") for i, logit in enumerate(logits)]
        tokens_S = torch.zeros(1, dtype=torch.int64)
        sample(
            torch.tensor([logits]),
            torch.tensor([sampling.temperature]),
            torch.tensor([sampling.top_k]),
            torch.tensor([sampling.top_p]),
            torch.tensor([sampling.min_p]),
            torch.tensor([sampling.seed]),
            torch.tensor([len(known)]),
            is_filtered=True,
            tokens_S=tokens_S,
        )
        output.append(int(tokens_S))
    return output


REQUESTS = _requests()
NAIVE = [_naive(r) for r in REQUESTS]


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_batching_chunks_preemption_and_overlap_give_the_tokens_of_a_naive_loop(setting, is_padded):
    engine = _engine(**setting)
    if is_padded:
        use_eager_graphs(engine)
    outputs = engine.generate(REQUESTS)
    for request, output, tokens in zip(REQUESTS, outputs, NAIVE, strict=True):
        assert output.token_ids == tokens, request
    assert (engine.scheduler.num_preemptions > 0) == ("kv_tokens" in setting)
    assert not engine.has_work
    assert engine.table.num_used_pages == 0


def test_a_step_computed_without_its_mask_is_computed_again(monkeypatch):
    from rose.engine.sequence import Sequence

    held, hold = [], Sequence.hold

    def counted(self):
        hold(self)
        held.append(self.num_stale)

    monkeypatch.setattr(Sequence, "hold", counted)
    _engine(is_overlapped=True).generate(REQUESTS)
    assert held.count(1) > 3
    num_starts = len(held)
    held.clear()
    _engine(is_overlapped=False).generate(REQUESTS)
    assert held == [0] * num_starts


def test_the_grammars_make_a_difference():
    constrained = [(r, t) for r, t in zip(REQUESTS, NAIVE, strict=True) if r.constraint is not None]
    free = [_naive(msgspec.structs.replace(r, constraint=None)) for r, _ in constrained]
    changed = [t for (_, t), f in zip(constrained, free, strict=True) if t != f]
    assert len(changed) > 0.8 * len(constrained)
    ended = [n for r, n in zip(REQUESTS, NAIVE, strict=True) if r.constraint == KINDS[0]]
    ended = [json.loads(text_of(t[:-1])) for t in ended if t[-1] == END]
    assert ended
    assert all(set(answer) == {"city", "days", "unit"} for answer in ended)


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_the_same_prompt_again_comes_from_the_prefix_cache_and_gives_the_same_tokens(is_overlapped):
    engine = _engine(is_overlapped=is_overlapped, kv_tokens=4096)
    first = engine.generate(REQUESTS)
    again = engine.generate(REQUESTS)
    assert [o.token_ids for o in first] == [o.token_ids for o in again] == NAIVE
    assert engine.scheduler.num_cached_tokens > 0


def _steps_until_end(engine, request_ids):
    """Return, per request, the numbers of the steps that brought it tokens."""
    steps = {i: [] for i in request_ids}
    number = 0
    while engine.has_work:
        number += 1
        for event in engine.step():
            if isinstance(event, TokensEvent):
                steps[event.request_id].append(number)
    return steps


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_free_sequences_are_not_held_up_by_a_slow_grammar(is_overlapped, monkeypatch):
    engine = _engine(is_overlapped=is_overlapped)
    from rose.engine.matchers import Matcher

    quick = Matcher.checked

    def slow(self, mask):
        time.sleep(0.02)
        return quick(self, mask)

    monkeypatch.setattr(Matcher, "checked", slow)
    held = Request(
        request_id="held",
        prompt_token_ids=[1, 2],
        max_tokens=20,
        stop_token_ids=[END],
        constraint=KINDS[0],
    )
    free = Request(request_id="free", prompt_token_ids=[3], max_tokens=200)
    engine.add(held)
    engine.add(free)
    steps = _steps_until_end(engine, ["held", "free"])
    assert len(steps["free"]) == 200
    gaps = {b - a for a, b in zip(steps["free"], steps["free"][1:], strict=False)}
    assert gaps == {1}, "a free sequence sat out a step"
    assert steps["held"], "the constrained one went on too"


def test_text_before_the_start_does_not_wait():
    engine = _engine(is_overlapped=True)
    request = Request(
        request_id="r",
        prompt_token_ids=[7, 8],
        max_tokens=40,
        sampling=SamplingParams(temperature=0),
        constraint=constraint((WORDS, [[GO]]), banned=[GO]),
    )
    engine.add(request)
    steps = _steps_until_end(engine, ["r"])["r"]
    assert len(steps) == 40
    assert steps[-1] - steps[0] == 39, "one token per step while no grammar rules"


def test_an_id_may_be_used_again_while_the_grammar_of_its_first_request_is_built():
    engine = _engine()
    request = msgspec.structs.replace(_requests(1)[0], constraint=KINDS[0])
    for _ in range(20):
        assert engine.add(request) == []
        engine.abort(request.request_id)
    [generation] = engine.generate([request])
    assert generation.reason is not None
    assert not engine.has_work


def test_the_threads_end_with_their_engine():
    before = set(threading.enumerate())
    engine = _engine()
    engine.generate(
        [msgspec.structs.replace(r, constraint=KINDS[0]) for r in _requests(2)],
    )
    threads = set(threading.enumerate()) - before
    assert sorted(t.name for t in threads) == ["grammar-builder", "grammar-matcher"]
    del engine
    gc.collect()
    for thread in threads:
        thread.join(5)
    assert not any(t.is_alive() for t in threads)


def test_an_abort_at_any_moment_leaks_nothing():
    for is_overlapped in (False, True):
        for num_steps in (0, 1, 2, 3, 5, 8, 13, 21):
            engine = _engine(is_overlapped=is_overlapped)
            for request in REQUESTS[:6]:
                engine.add(request)
            for _ in range(num_steps):
                engine.step()
            for request in REQUESTS[:6]:
                engine.abort(request.request_id)
            deadline = time.monotonic() + 5
            while engine.has_work and time.monotonic() < deadline:
                assert not any(isinstance(e, TokensEvent | ErrorEvent) for e in engine.step())
            assert not engine.has_work
            assert engine.table.num_used_pages == 0
            assert engine.running_ids() == []


def _events_of(engine, request):
    events = engine.add(request)
    while engine.has_work:
        events += engine.step()
    return events


def test_a_grammar_that_cannot_be_built_fails_its_request_alone():
    engine = _engine()
    bad = Request(
        request_id="bad",
        prompt_token_ids=[1],
        max_tokens=5,
        constraint=constraint(("start: nonsense", [[GO]])),
    )
    engine.add(Request(request_id="good", prompt_token_ids=[1], max_tokens=5))
    events = _events_of(engine, bad)
    [error] = [e for e in events if isinstance(e, ErrorEvent)]
    assert (error.request_id, error.code) == ("bad", "grammar_failed")
    assert "cannot be built" in error.message
    [end] = [e for e in events if isinstance(e, FinishedEvent)]
    assert (end.request_id, end.num_output_tokens) == ("good", 5)
    assert engine.running_ids() == []
    request = Request(request_id="r", prompt_token_ids=[1], max_tokens=5, constraint=KINDS[0])
    _events_of(engine, request)
    status = engine.status()
    assert status.num_grammar_failures == 1
    assert sum(status.histograms["request_grammar_seconds"].counts) == 1


def test_a_matcher_that_fails_in_the_middle_ends_its_request_with_a_reason(monkeypatch):
    from rose.engine.matchers import Matcher

    take, calls = Matcher.take, []

    def failing(self, token_id):
        calls.append(token_id)
        if len(calls) == 3:
            raise ValueError("a bug of the library")
        take(self, token_id)

    monkeypatch.setattr(Matcher, "take", failing)
    for is_overlapped in (False, True):
        calls.clear()
        engine = _engine(is_overlapped=is_overlapped)
        request = Request(request_id="r", prompt_token_ids=[1], max_tokens=50, constraint=KINDS[0])
        events = _events_of(engine, request)
        tokens = [t for e in events if isinstance(e, TokensEvent) for t in e.token_ids]
        assert tokens == calls[:3]
        assert isinstance(events[-1], ErrorEvent)
        assert events[-1].code == "grammar_failed"
        assert "a bug of the library" in events[-1].message
        assert engine.table.num_used_pages == 0


def test_a_grammar_for_an_unknown_vocabulary_is_refused():
    engine = _engine()
    strange = msgspec.structs.replace(KINDS[0], vocabulary="f" * 64)
    request = Request(request_id="r", prompt_token_ids=[1], max_tokens=5, constraint=strange)
    [error] = engine.add(request)
    assert error.code == "grammar_failed"
    assert re.search(r"vocabulary 'f+'.*not sent", error.message)
    assert engine.status().vocabularies == [tiny_vocabulary().key]


def test_a_limit_in_the_middle_of_a_grammar_ends_with_length():
    for is_overlapped in (False, True):
        engine = _engine(is_overlapped=is_overlapped)
        request = Request(request_id="r", prompt_token_ids=[1], max_tokens=4, constraint=KINDS[0])
        [output] = engine.generate([request])
        assert output.reason == "length"
        assert text_of(output.token_ids).startswith("{")
        assert len(output.token_ids) == 4


def test_a_slot_that_had_a_mask_is_free_for_the_next_sequence():
    engine = _engine(sequences=1)
    greedy = SamplingParams(temperature=0)
    held, free = (
        Request(
            request_id=str(i), prompt_token_ids=[9], max_tokens=6, sampling=greedy, constraint=c
        )
        for i, c in enumerate((KINDS[0], None))
    )
    engine.generate([held])
    assert engine.generate([free])[0].token_ids == expected_output([9], 6)


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (msgspec.structs.replace(KINDS[0], late=1), "late=1; allowed: a place"),
        (
            msgspec.structs.replace(KINDS[0], grammars=KINDS[0].grammars * 65),
            "65 grammars; allowed: 64",
        ),
    ],
)
def test_a_constraint_that_makes_no_sense_is_refused(constraint, text):
    [error] = _engine().add(
        Request(request_id="r", prompt_token_ids=[1], max_tokens=3, constraint=constraint)
    )
    assert error.code == "invalid_request"
    assert text in error.message


def test_grammars_waiting_to_be_built_count_as_a_queue():
    engine = _engine(waiting=2)
    requests = [
        Request(request_id=str(i), prompt_token_ids=[1], max_tokens=3, constraint=KINDS[0])
        for i in range(3)
    ]
    events = [engine.add(r) for r in requests]
    assert events[:2] == [[], []]
    assert events[2][0].code == "queue_full"


def test_a_grammar_of_which_nothing_is_heard_ends_its_request(monkeypatch):
    from rose.engine import grammars
    from rose.engine.matchers import Matcher

    monkeypatch.setattr(grammars, "LIMIT_SECONDS", 0.1)
    take, calls = Matcher.take, []

    def slow(self, token_id):
        calls.append(token_id)
        if len(calls) == 3:
            time.sleep(0.5)
        take(self, token_id)

    monkeypatch.setattr(Matcher, "take", slow)
    engine = _engine(is_overlapped=True)
    request = Request(request_id="r", prompt_token_ids=[1], max_tokens=50, constraint=KINDS[0])
    events = _events_of(engine, request)
    assert isinstance(events[-1], ErrorEvent)
    assert "nothing was heard of its grammar for 0.1 s" in events[-1].message
    assert engine.table.num_used_pages == 0
    assert not engine.has_work


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, len(REQUESTS) - 1),
        st.integers(0, 12),  # steps before the next arrives
        st.one_of(st.none(), st.integers(0, 40)),  # steps until it is aborted
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.parametrize("is_overlapped", [False, True])
@given(history=ARRIVALS, kv_tokens=st.sampled_from([128, 256, 1024]))
@settings(max_examples=15, deadline=None)
def test_any_history_gives_every_request_the_tokens_of_a_naive_loop(
    history, kv_tokens, is_overlapped
):
    _check_history(history, kv_tokens, is_overlapped)


@pytest.mark.slow
@pytest.mark.parametrize("is_overlapped", [False, True])
@given(history=ARRIVALS, kv_tokens=st.sampled_from([128, 256, 1024]))
@settings(max_examples=1000, deadline=None)
def test_thousands_of_histories_give_the_tokens_of_a_naive_loop(history, kv_tokens, is_overlapped):
    _check_history(history, kv_tokens, is_overlapped)


def _check_history(history, kv_tokens, is_overlapped):
    engine = _engine(kv_tokens=kv_tokens, is_overlapped=is_overlapped, sequences=4, waiting=64)
    _watch_writes(engine)
    got: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    aborts: list[tuple[int, str]] = []
    number = 0

    def note(events):
        for event in events:
            if isinstance(event, TokensEvent):
                got[event.request_id] += event.token_ids
            else:
                assert isinstance(event, FinishedEvent), event
                ends[event.request_id] = event.reason

    def step():
        nonlocal number
        number += 1
        note(engine.step())
        check_pages(engine.table, engine.scheduler.running)
        for due, name in [a for a in aborts if a[0] <= number]:
            aborts.remove((due, name))
            note(engine.abort(name))

    for i, (which, pause, until_abort) in enumerate(history):
        name = f"{i}-{which}"
        got[name] = []
        note(engine.add(msgspec.structs.replace(REQUESTS[which], request_id=name)))
        if until_abort is not None:
            aborts.append((number + until_abort, name))
        for _ in range(pause):
            step()
    while engine.has_work:
        step()
    for name, tokens in got.items():
        wanted = NAIVE[int(name.partition("-")[2])]
        if ends[name] == "abort":
            assert tokens == wanted[: len(tokens)]
        else:
            assert tokens == wanted
    assert is_clean(engine.table)
    assert not engine.grammars.is_busy


def _watch_writes(engine):
    """Look at every step before it is launched: nobody writes into a page that somebody else holds."""
    launch = engine.decoder.launch

    def checked(plan):
        by_slot = {s.slot: s for s in engine.scheduler.running}
        for entry in plan.decode + plan.prefill:
            check_written(engine.table, by_slot[entry.slot], entry)
        return launch(plan)

    engine.decoder.launch = checked
