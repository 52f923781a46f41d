"""The engine over a fake model whose tokens depend on every page: batching, chunks, preemption, overlap."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.graphs import use_eager_graphs
from fakes.model import VOCAB, FakeModel, expected_output, fake_config
from fakes.pages import check_pages, check_written, is_clean
from rose.config.cache import CacheConfig
from rose.config.decoding import DecodingConfig
from rose.config.engine import EngineConfig
from rose.config.scheduler import SchedulerConfig
from rose.decoders.plain import PlainDecoder
from rose.engine.engine import LLMEngine, RequestRefused
from rose.frontend.errors import RequestError
from rose.protocol.event import ErrorEvent, FinishedEvent, TokensEvent
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams
from rose.utils.errors import ConfigError

GREEDY = SamplingParams(temperature=0)


def _engine(
    *,
    kv_tokens=512,
    budget=64,
    mixed=32,
    sequences=8,
    is_overlapped=False,
    waiting=64,
    waiting_tokens=1_000_000,
    policy="first-come",
    model=None,
    prefix_cache=True,
    **config,
):
    return LLMEngine.from_model(
        model or FakeModel(),
        EngineConfig(
            model="fake",
            device="cpu",
            cache=CacheConfig(page_tokens=16, kv_tokens=kv_tokens, prefix_cache=prefix_cache),
            scheduler=SchedulerConfig(
                max_step_tokens=budget,
                max_mixed_tokens=mixed,
                max_sequences=sequences,
                max_waiting=waiting,
                max_waiting_tokens=waiting_tokens,
                policy=policy,
            ),
            **config,
        ),
        is_overlapped=is_overlapped,
    )


def _request(name, prompt, max_tokens, *, sampling=GREEDY, stop=()):
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        max_tokens=max_tokens,
        sampling=sampling,
        stop_token_ids=list(stop),
    )


def _prompts(count, seed=0, longest=150):
    generator = random.Random(seed)
    return [
        [generator.randrange(VOCAB) for _ in range(generator.randint(1, longest))]
        for _ in range(count)
    ]


def _is_idle(engine):
    return is_clean(engine.table) and not engine.has_work


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_batched_chunked_and_preempted_sequences_give_the_tokens_of_a_naive_loop(is_overlapped):
    engine = _engine(kv_tokens=256, is_overlapped=is_overlapped)
    prompts = _prompts(14)
    outputs = engine.generate(_request(f"r{i}", p, 40) for i, p in enumerate(prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == expected_output(prompt, 40)
        assert output.reason == "length"
    assert engine.scheduler.num_preemptions > 0, "the cache was to be too small for all of them"
    assert _is_idle(engine)


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_stop_tokens_end_a_request_and_belong_to_its_output(is_overlapped):
    engine = _engine(is_overlapped=is_overlapped)
    prompts = _prompts(6, seed=3, longest=40)
    whole = [expected_output(p, 30) for p in prompts]
    stops = [w[i * 3] for i, w in enumerate(whole)]
    outputs = engine.generate(
        _request(f"r{i}", p, 30, stop=[s])
        for i, (p, s) in enumerate(zip(prompts, stops, strict=True))
    )
    for tokens, stop, output in zip(whole, stops, outputs, strict=True):
        assert output.token_ids == tokens[: tokens.index(stop) + 1]
        assert output.reason == "stop"
    assert _is_idle(engine)


def test_sampled_tokens_do_not_depend_on_batch_chunks_overlap_or_preemption():
    prompts = _prompts(12, seed=5)
    requests = [
        _request(f"r{i}", p, 24, sampling=SamplingParams(temperature=1.5, top_p=0.9, seed=i - 3))
        for i, p in enumerate(prompts)
    ]
    alone = [_engine().generate([r])[0].token_ids for r in requests]
    together = _engine(kv_tokens=256, is_overlapped=True).generate(requests)
    assert [o.token_ids for o in together] == alone
    greedy = [expected_output(p, 24) for p in prompts]
    assert alone != greedy, "the temperature was to make a difference"


def test_requests_without_a_seed_draw_different_ones_and_the_engine_seed_repeats_them():
    sampling = SamplingParams(temperature=5.0)
    requests = [_request(f"r{i}", [1, 2, 3], 20, sampling=sampling) for i in range(2)]
    first, second = _engine().generate(requests)
    assert first.token_ids != second.token_ids
    assert _engine().generate(requests) == [first, second]
    assert _engine(seed=1).generate(requests)[0] != first


def test_ids_past_the_vocabulary_are_never_sampled():
    engine = _engine(model=FakeModel(num_head_columns=128))
    [output] = engine.generate([_request("r", [5, 6, 7], 20)])
    assert output.token_ids == expected_output([5, 6, 7], 20)


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("steps", range(6))
def test_an_abort_ends_a_request_within_one_step_and_leaks_nothing(is_overlapped, steps):
    engine = _engine(is_overlapped=is_overlapped)
    prompts = _prompts(3, seed=7)
    for i, prompt in enumerate(prompts):
        assert engine.add(_request(f"r{i}", prompt, 20)) == []
    events = [e for _ in range(steps) for e in engine.step()]
    [final] = engine.abort("r1")
    assert (final.reason, final.request_id) == ("abort", "r1")
    assert final.num_output_tokens == sum(e.request_id == "r1" for e in events)
    assert engine.abort("r1") == [] == engine.abort("unknown")
    while engine.has_work:
        events += engine.step()
    for i in (0, 2):
        tokens = [
            t
            for e in events
            if isinstance(e, TokensEvent) and e.request_id == f"r{i}"
            for t in e.token_ids
        ]
        assert tokens == expected_output(prompts[i], 20)
    assert _is_idle(engine)


def test_events_of_a_request_are_its_tokens_and_one_final_event():
    engine = _engine()
    engine.add(_request("r", [1, 2, 3], 3))
    events = []
    while engine.has_work:
        events += engine.step()
    assert [type(e) for e in events] == [TokensEvent] * 3 + [FinishedEvent]
    assert events[-1] == FinishedEvent(
        request_id="r", reason="length", num_prompt_tokens=3, num_output_tokens=3
    )


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (
            _request("r", [1] * 500, 13),
            "context_length_exceeded",
            "513 tokens; the context length is 512",
        ),
        (_request("r", [1] * 300, 100), "context_length_exceeded", "KV cache holds 384 tokens"),
        (_request("r", [], 1), "invalid_request", "prompt_token_ids is empty"),
        (
            _request("r", [1, VOCAB], 1),
            "invalid_request",
            r"prompt_token_ids\[1\]=97; allowed: 0 to 96",
        ),
        (_request("r", [1], 1, stop=[-1]), "invalid_request", r"stop_token_ids\[0\]=-1"),
        (_request("r", [1], 0), "invalid_request", "max_tokens=0; allowed: 1 or more"),
        (
            _request("r", [1], 1, sampling=SamplingParams(top_p=0.0, temperature=-1)),
            "invalid_request",
            "temperature=-1.*top_p=0.0",
        ),
    ],
)
def test_requests_that_can_never_run_are_refused_at_once(request_, code, text):
    engine = _engine(kv_tokens=384)
    [error] = engine.add(request_)
    assert isinstance(error, ErrorEvent)
    assert error.code == code
    with pytest.raises(RequestRefused, match=text):
        engine.generate([request_])
    assert not engine.has_work


def test_a_full_queue_and_a_repeated_id_are_refused():
    engine = _engine(waiting=2)
    for i in range(2):
        assert engine.add(_request(f"r{i}", [1], 2)) == []
    assert engine.add(_request("r2", [1], 2))[0].code == "queue_full"
    engine.step()
    assert engine.add(_request("r0", [1], 2))[0].code == "duplicate_request_id"
    assert engine.add(_request("r2", [1], 2)) == []


def test_a_priority_is_refused_where_nobody_looks_at_it_and_obeyed_elsewhere():
    engine = _engine()
    urgent = msgspec.structs.replace(_request("a", [1], 2), priority=-1)
    [error] = engine.add(urgent)
    assert error.code == "invalid_request"
    assert "--policy priority" in error.message
    assert RequestError.of_event(error).param == "priority"
    engine = _engine(sequences=1, policy="priority")
    for name, priority in (("a", 0), ("b", 3), ("c", -1)):
        engine.add(msgspec.structs.replace(_request(name, [1], 2), priority=priority))
    ended = []
    while engine.has_work:
        ended += [e.request_id for e in engine.step() if isinstance(e, FinishedEvent)]
    assert ended == ["c", "a", "b"]


def test_a_queue_full_of_tokens_refuses_with_the_numbers():
    engine = _engine(sequences=1, waiting_tokens=100)
    for name in "ab":
        assert engine.add(_request(name, [1] * 60, 2)) == []
        engine.step()
    [error] = engine.add(_request("c", [1] * 60, 2))
    assert error.code == "queue_full"
    assert "60 tokens are waiting" in error.message
    assert engine.counters.num_refused == 1


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_request_ends_when_its_time_is_up_waiting_or_running(is_overlapped, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    engine = _engine(sequences=1, is_overlapped=is_overlapped)
    for name, timeout_s in (("runs", 5.0), ("waits", 1.0), ("patient", None)):
        request = msgspec.structs.replace(_request(name, [1, 2], 400), timeout_s=timeout_s)
        assert engine.add(request) == []
    for _ in range(5):
        engine.step()
    assert engine.expire() == []
    now[0] += 1.0
    [error] = engine.expire()
    assert (error.request_id, error.code) == ("waits", "request_timeout")
    assert "timeout=1 s" in error.message
    assert "still waiting" in error.message
    now[0] += 10.0
    [error] = engine.expire()
    assert (error.request_id, error.code) == ("runs", "request_timeout")
    assert "tokens generated" in error.message
    assert engine.table.num_used_pages == 0
    assert engine.running_ids() == ["patient"]
    engine.abort("patient")
    while engine.has_work:
        engine.step()
    assert _is_idle(engine)


def test_deadlines_of_requests_that_ended_are_not_kept():
    engine = _engine()
    for i in range(200):
        engine.add(msgspec.structs.replace(_request(f"r{i}", [1], 1), timeout_s=1000.0))
        engine.step()
    assert len(engine._deadlines) <= 66


def test_a_prompt_of_the_whole_context_runs():
    engine = _engine()
    prompt = [i % VOCAB for i in range(511)]
    [output] = engine.generate([_request("r", prompt, 1)])
    assert output.token_ids == expected_output(prompt, 1)


def test_the_status_counts_what_happened():
    engine = _engine()
    assert engine.status().kv_pages_total == 32
    assert (engine.status().weights_format, engine.status().kv_format) == ("bf16", "float32")
    engine.add(_request("r", [1] * 20, 4))
    engine.step()
    status = engine.status()
    assert (status.num_running, status.kv_pages_used, status.num_prompt_tokens) == (1, 2, 20)
    while engine.has_work:
        engine.step()
    status = engine.status()
    assert (status.num_running, status.kv_pages_used, status.num_output_tokens) == (0, 0, 4)
    assert (status.is_ready, status.context_tokens, status.vocab_size) == (True, 512, VOCAB)


def test_the_configuration_chooses_the_loop_and_a_cpu_takes_steps_in_turn():
    def loop(**config):
        return _engine(is_overlapped=None, **config).step.__name__

    assert loop() == loop(overlap=False) == "_step_in_turn"
    assert loop(overlap=True) == "_step_overlapped"


def test_a_decoder_that_cannot_overlap_is_refused_only_where_it_is_asked_to(monkeypatch):
    monkeypatch.setattr(PlainDecoder, "can_overlap", False)
    assert _engine(is_overlapped=None).step.__name__ == "_step_in_turn"
    with pytest.raises(ConfigError, match="overlap=True was asked for; the decoder 'plain' needs"):
        _engine(is_overlapped=None, overlap=True)


def test_more_sequences_than_decode_kernels_are_made_for_still_decode():
    engine = _engine(kv_tokens=1100 * 16, budget=2048, mixed=2048, sequences=520, waiting=600)
    prompts = [[i % VOCAB] for i in range(520)]
    outputs = engine.generate(_request(f"r{i}", p, 3) for i, p in enumerate(prompts))
    assert max(engine.model.num_tokens_seen) == 520
    assert [o.token_ids for o in outputs] == [expected_output(p, 3) for p in prompts]


def test_an_unknown_decoder_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match="decoder='magic' is not known; allowed: plain"):
        _engine(decoding=DecodingConfig(decoder="magic"))


def test_a_context_that_the_cache_cannot_hold_is_refused_where_it_was_asked_for():
    with pytest.raises(ConfigError, match=r"kv_tokens=64.*512 is to fit"):
        _engine(kv_tokens=64, context_tokens=512)


def test_a_model_without_window_layers_runs():
    model = FakeModel(fake_config(window_tokens=(None, None)))
    engine = _engine(model=model)
    [output] = engine.generate([_request("r", range(60), 10)])
    assert output.token_ids == expected_output(range(60), 10)
    assert list(engine.table.pools) == ["full"]


histories = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 120), st.integers(1, 40), st.booleans()),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("step"), st.integers(1, 12)),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(
    history=histories,
    is_overlapped=st.booleans(),
    kv_pages=st.integers(10, 40),
    policy=st.sampled_from(["first-come", "priority"]),
)
def test_any_history_gives_every_request_the_tokens_of_a_naive_loop(
    history, is_overlapped, kv_pages, policy
):
    _check_history(history, is_overlapped, kv_pages, policy)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(
    history=histories,
    is_overlapped=st.booleans(),
    kv_pages=st.integers(10, 24),
    policy=st.sampled_from(["first-come", "priority"]),
)
def test_thousands_of_histories_give_the_tokens_of_a_naive_loop(
    history, is_overlapped, kv_pages, policy
):
    _check_history(history, is_overlapped, kv_pages, policy)


def _watch_pages(engine):
    """Check at every launch that no page is written while shared, lost or leaked."""
    launch, scheduler = engine.decoder.launch, engine.scheduler

    def checked(plan):
        check_pages(scheduler.table, scheduler.running)
        for entry in plan.decode + plan.prefill:
            check_written(scheduler.table, scheduler._in_slot[entry.slot], entry)
        return launch(plan)

    engine.decoder.launch = checked


def _check_history(history, is_overlapped, kv_pages, policy):
    engine = _engine(
        kv_tokens=16 * kv_pages, is_overlapped=is_overlapped, sequences=4, policy=policy
    )
    use_eager_graphs(engine)
    _watch_pages(engine)
    wanted, events = {}, []
    for action, *values in history:
        if action == "add":
            prompt, output, is_stopped = values
            # Three families of prompts; two of the same family share all of the shorter one.
            first = 7 * (prompt % 3)
            name, tokens = f"r{len(wanted)}", [(first + i) % VOCAB for i in range(prompt)]
            wanted[name] = expected_output(tokens, output)
            stop = wanted[name][output // 2 : output // 2 + 1] if is_stopped else []
            if stop:
                wanted[name] = wanted[name][: wanted[name].index(stop[0]) + 1]
            request = _request(name, tokens, output, stop=stop)
            if policy == "priority":
                request = msgspec.structs.replace(request, priority=output % 3 - 1)
            events += engine.add(request)
        elif action == "abort":
            events += engine.abort(f"r{values[0]}")
        else:
            for _ in range(values[0]):
                events += engine.step()
    while engine.has_work:
        events += engine.step()
    for name, tokens in wanted.items():
        mine = [e for e in events if e.request_id == name]
        found = [t for e in mine[:-1] for t in e.token_ids]
        assert isinstance(mine[-1], FinishedEvent | ErrorEvent)
        is_aborted = isinstance(mine[-1], FinishedEvent) and mine[-1].reason == "abort"
        assert found == (tokens[: len(found)] if is_aborted or not mine[:-1] else tokens)
    assert _is_idle(engine)
