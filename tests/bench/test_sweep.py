"""Cells of `rose bench` on the tiny shape: what is timed, what is refused, what a line holds."""

from __future__ import annotations

import json
import mmap
from functools import partial

import pytest
import torch

from rose.bench import estimate, run, sweep
from rose.bench.estimate import Work, work_of
from rose.bench.fit import CellError, refusal
from rose.bench.growth import Held, growth
from rose.bench.load import closed_loop, mixed
from rose.bench.profile import KernelTime, text
from rose.bench.progress import BenchProgress
from rose.bench.record import Origin, percentile
from rose.bench.run import run_parts
from rose.bench.session import Session
from rose.bench.sweep import (
    DECODE_STEPS,
    PromptSource,
    cached_decode_milliseconds,
    decode_milliseconds,
    decode_tokens,
    prefill_seconds,
    submit,
)


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> Session:
    folder = tmp_path_factory.mktemp("bench")
    return Session(
        BenchProgress(),
        size="tiny",
        weights="mxfp4",
        device="cpu",
        layers=2,
        kv_tokens=4096,
        max_mixed_tokens=256,
        path=folder / "results.jsonl",
        profile=folder / "profile",
        commit="abc",
    )


def test_a_prefill_line_has_the_fields_of_the_score_table(session):
    session.prefill(40, 2)
    line = json.loads(session.path.read_text().splitlines()[-1])
    for name in ("median", "p10", "p90", "config", "date", "command", "distinct_experts"):
        assert name in line, name
    assert (line["bench"], line["model"], line["tokens"]) == ("prefill", "tiny", 40)
    assert line["num_samples"] == 2
    assert (line["device"], line["commit"], line["kv"]) == ("cpu", "abc", "float32")
    assert line["option"] is True  # cut layers are no result
    trace = json.loads((session.profile / "prefill-40.json").read_text())
    assert trace["traceEvents"]
    assert "aten::" in (session.profile / "prefill-40.txt").read_text()


def test_kv_in_e4m3_is_named_in_its_lines_and_makes_them_options(tmp_path):
    session = Session(
        BenchProgress(), size="tiny", weights="mxfp4", kv="fp8_e4m3", device="cpu",
        kv_tokens=2048, path=tmp_path / "r.jsonl", commit="abc",
    )  # fmt: skip
    # Counting them takes a quarter of a minute, and comes to the same whatever KV is in.
    session.distinct_experts = lambda _tokens: 1.0
    session.prefill(40, 1)
    session.decode(2, 70, 1, is_filled=True)
    lines = [json.loads(text) for text in session.path.read_text().splitlines()]
    assert [(x["bench"], x["kv"], x["option"]) for x in lines] == [
        ("prefill", "fp8_e4m3", True),
        ("decode_filled", "fp8_e4m3", True),
    ]
    assert all("kv=fp8_e4m3" in x["config"] for x in lines)


def test_cells_that_do_not_fit_are_left_out_with_the_reason(session):
    before = len(session.lines)
    session.prefill(200_000, 1)
    session.decode(64, 1000)
    session.decode(257, 8)
    assert len(session.lines) == before
    reasons = dict(session.left_out)
    assert "context length is 131072" in reasons["prefill 200000"]
    assert "the KV cache has 64" in reasons["decode 64 x 1000"]
    assert "runs 256" in reasons["decode 257 x 8"]


def test_a_cell_that_just_fits_runs_without_preemption(session):
    engine, tokens = session.engine, 600
    assert refusal(engine, sequences=5, tokens=tokens) is None
    assert refusal(engine, sequences=6, tokens=tokens) is not None
    requests = [session.prompts.request(tokens - 20, 20) for _ in range(5)]
    outputs = engine.generate(requests)
    assert [len(o.token_ids) for o in outputs] == [20] * 5
    assert engine.scheduler.num_preemptions == 0


def test_no_sequence_ends_before_the_timed_steps_do(session, monkeypatch):
    monkeypatch.setattr(sweep, "DECODE_STEPS", 8)
    # 4 prompts of 600 tokens in chunks of at most 256 while others decode: many steps for the first one.
    tokens = decode_tokens(session.engine, 4, 600)
    assert tokens < 700
    samples = decode_milliseconds(session.engine, session.prompts, 4, 600, steps=8)
    assert len(samples) == 4
    assert all(s > 0 for s in samples)
    assert not session.engine.has_work
    assert session.engine.table.num_used_pages == 0


def test_decode_is_the_difference_of_97_tokens_and_one_with_the_prompts_cached(
    session, monkeypatch
):
    engine, steps = session.engine, [0]
    step = engine.step

    def counted():
        steps[0] += 1
        return step()

    monkeypatch.setattr(engine, "step", counted)
    monkeypatch.setattr(sweep.time, "perf_counter", lambda: float(steps[0]))
    before = engine.counters.num_prompt_tokens
    samples = cached_decode_milliseconds(engine, session.prompts, 4, 200)
    # With a clock that counts steps: 97 less 1, of 96; a thousand "milliseconds" each.
    assert samples == [1000.0] * sweep.CACHED_REPEATS
    # Each prompt is computed once, then 8 of its 200 tokens in each of two runs per sample.
    computed = engine.counters.num_prompt_tokens - before
    assert computed == 4 * (200 + 2 * sweep.CACHED_REPEATS * 8)
    assert not engine.has_work


def test_a_decode_line_says_how_it_was_timed(session, monkeypatch):
    monkeypatch.setattr(session, "profile", None)
    session.decode(2, 100)
    line = json.loads(session.path.read_text().splitlines()[-1])
    assert line["timed"] == "(t97 - t1) / 96, prompts cached"
    assert line["num_samples"] == sweep.CACHED_REPEATS
    monkeypatch.setattr(session.engine.table, "is_caching", False)
    session.decode(2, 100)
    line = json.loads(session.path.read_text().splitlines()[-1])
    assert line["timed"] == "96 steps after prefill"


def test_prompts_that_are_not_in_the_cache_are_not_timed_as_if_they_were(session, monkeypatch):
    monkeypatch.setattr(session.engine.table, "is_caching", False)
    with pytest.raises(CellError, match="found 0 of them in the prefix cache, 192 were to be"):
        cached_decode_milliseconds(session.engine, session.prompts, 2, 200)


def test_filled_prompts_are_found_like_computed_ones_and_never_computed(session):
    engine, prompts = session.engine, session.prompts
    before, used = engine.counters.num_prompt_tokens, engine.table.num_used_pages
    # 600 tokens are three chunks of this engine; a hit needs the window's pages of the last.
    samples = cached_decode_milliseconds(engine, prompts, 2, 600, repeats=1, is_filled=True)
    assert len(samples) == 1
    # 600 = 9 pages of 64 and 24 tokens, computed in both runs and in one before them that is not timed.
    assert engine.counters.num_prompt_tokens - before == 2 * 3 * 24
    assert engine.table.num_used_pages == used


def test_pages_of_made_up_kv_hold_numbers_that_differ(session):
    sweep.randomise_kv(session.engine)
    for pages in session.engine.decoder.runner.kv_pages:
        assert pages.float().std() == pytest.approx(1.0, abs=0.05)
        assert not torch.equal(pages[0], pages[1])


def test_made_up_kv_is_made_once_and_its_cells_are_no_cells_of_the_score_table(
    session, monkeypatch
):
    monkeypatch.setattr(session, "profile", None)
    session.decode(1, 100, 1, is_filled=True)
    line = json.loads(session.path.read_text().splitlines()[-1])
    assert line["bench"] == "decode_filled"
    assert line["timed"].endswith(", KV made up")
    assert line["in_order"] == [round(line["median"], 4)]
    monkeypatch.setattr(sweep, "randomise_kv", None)  # not called again
    session.make_up_kv()


def test_growth_shows_what_each_step_keeps(session, monkeypatch):
    engine, kept, step = session.engine, [], session.engine.step

    def leaking():
        kept.append(mmap.mmap(-1, 2 << 20))  # from the system: the heap has room from earlier tests
        kept[-1].write(b"x" * (2 << 20))
        return step()

    sizes = {"steps": 20, "batch": 2, "prompt_tokens": 64, "output_tokens": 8}
    result = growth(engine, session.prompts, **sizes)
    assert len(result.step_ms) == 20
    # Two sequences of eight or nine steps each, some shorter at first, for twenty steps.
    assert 4 <= result.num_requests <= 6
    assert not engine.has_work
    grown = result.after.less(result.before)
    assert (grown.allocated, grown.reserved, grown.taken) == (0, 0, 0)  # no device
    assert result.before.resident > 50 << 20  # torch alone takes more
    monkeypatch.setattr(engine, "step", leaking)
    leaked = growth(engine, session.prompts, **sizes)
    grown = leaked.after.less(leaked.before).resident
    # 40 MiB; a machine short of memory takes pages of files back meanwhile.
    assert 36 << 20 <= grown < 48 << 20


def test_what_is_held_is_named_in_bytes():
    held = Held(allocated=1, reserved=2, taken=3, resident=4)
    assert held.words() == {
        "allocated_bytes": 1, "reserved_bytes": 2, "taken_bytes": 3, "resident_bytes": 4
    }  # fmt: skip
    assert held.less(held) == Held(allocated=0, reserved=0, taken=0, resident=0)


def _sized(**changes):
    return {"size": "tiny", "weights": "mxfp4", "device": "cpu", "layers": 1, "kv_tokens": 2048} | changes  # fmt: skip


def test_no_cell_begins_after_its_time_and_the_status_says_so(capsys):
    cell = Session.prefill
    parts = [[partial(cell, tokens=tokens, repeats=1) for tokens in (20, 200_000)]]
    assert run_parts(parts, **_sized(until=1e-6)) == 1
    told = capsys.readouterr().out.replace("\n", " ")
    assert "prefill 20: " in told
    assert "none begins after 1e-06 (--until)" in told
    assert "prefill 200000: 200001 tokens, the context length is 131072" in told


def test_what_was_measured_is_told_to_whoever_interrupts(capsys):
    [cell] = run.prefill_part(tokens=[20], prompts=1, repeats=1)
    cells = [cell, partial(_interrupt, tokens=1, repeats=1)]
    with pytest.raises(KeyboardInterrupt):
        run_parts([cells], **_sized())
    assert "prefill 20" in capsys.readouterr().out


def test_what_takes_long_on_a_cpu_is_announced_with_its_time(capsys, monkeypatch):
    """Of 256 tokens 1 s and of 1024 tokens 10 s: 2000 tokens take 34.4 s by a parabola, and come four times."""
    monkeypatch.setattr(estimate, "prefill_seconds", lambda _e, _p, n: {256: 1.0, 1024: 10.0}[n])
    monkeypatch.setattr(estimate, "decode_milliseconds", lambda *_a, **_o: [90.0, 100.0, 500.0])
    prompts = {"tokens": 2000, "repeats": 3}
    steps = {"batch": 2, "context": 20, "is_filled": True, "repeats": 11}
    for cell, minutes in (
        (prompts, "2.3"),
        (steps, "1.8"),  # 1056 of 0.1 s
        (prompts | {"tokens": 20}, None),
        (steps | {"repeats": 10}, None),
    ):
        with pytest.raises(KeyboardInterrupt):
            run_parts([[partial(_interrupt, **cell)]], **_sized(kv_tokens=4096))
        told = capsys.readouterr().err.replace("\n", " ")
        assert ("these cells take about" in told) == (minutes is not None)
        assert f"about {minutes} minutes on this CPU, or more" in told or minutes is None


def _interrupt(_session, **_options):
    raise KeyboardInterrupt


def test_work_is_counted_where_it_is_done():
    [decode] = run.decode_part(batches=[4], context=[100], repeats=3)
    assert work_of(decode.keywords, 1000) == Work(prompts=4, tokens=100, steps=3 * DECODE_STEPS)
    assert work_of(decode.keywords, 1000, is_caching=False).steps == DECODE_STEPS
    assert work_of(decode.keywords, 400) == Work()
    [filled] = run.decode_part(batches=[4], context=[100], repeats=3, fill=True)
    assert work_of(filled.keywords, 1000) == Work(steps=3 * DECODE_STEPS)
    [many] = run.prefill_part(tokens=[50], prompts=8, repeats=2)
    assert work_of(many.keywords, 1000) == Work(prompts=16, tokens=50)
    [load] = run.load_part(input_tokens=[10], output_tokens=5, in_flight=[3], rounds=2)
    assert work_of(load.keywords, 1000) == Work(prompts=6, tokens=10, steps=10)
    assert work_of(load.keywords | {"seconds": 1.0}, 1000) == Work()
    [mixed_cell] = run.mixed_part(batch=2, context=10, prompt_tokens=90, repeats=3)
    assert work_of(mixed_cell.keywords, 1000) == Work(prompts=4, tokens=90)


def test_closed_loop_ends_in_time_and_times_what_it_saw(session):
    engine = session.engine
    computed = engine.counters.num_prompt_tokens
    result = closed_loop(
        engine, session.prompts, in_flight=2, input_tokens=200, output_tokens=40, requests=10_000,
        seconds=2.0, is_filled=True,
    )  # fmt: skip
    assert 2.0 < result.seconds < 60
    assert 0 < len(result.token_ms) == result.num_requests < 10_000
    assert not engine.has_work
    # The first two found their prompts, all but 8 tokens of each.
    assert (engine.counters.num_prompt_tokens - computed - 2 * 8) % 200 == 0


def test_a_request_shorter_than_the_least_seen_is_timed_whole(session):
    # All of its 4 tokens are seen, so that it has a time per token.
    result = closed_loop(
        session.engine, session.prompts, in_flight=2, input_tokens=20, output_tokens=4, requests=4,
        seconds=60,
    )  # fmt: skip
    assert result.num_requests >= 4


def test_a_cell_without_a_figure_leaves_the_engine_empty(session):
    with session.measuring("load"):
        closed_loop(
            session.engine, session.prompts, in_flight=2, input_tokens=20, output_tokens=40, requests=1,
            seconds=1e-9,
        )  # fmt: skip
    with session.measuring("prefill"):
        submit(session.engine, session.prompts.request(20, 4))
        submit(session.engine, session.prompts.request(200_000, 4))
    assert not session.engine.has_work
    assert session.engine.running_ids() == []
    (first, why), (second, refused) = session.failed
    assert (first, second) == ("load", "prefill")
    assert why.startswith("no request of 2 in flight had 16 tokens within ")
    assert why.endswith("; give it more --seconds")
    assert refused.startswith("context_length_exceeded: ")
    assert session.report() == 1
    session.failed.clear()
    assert session.report() == 0


def test_prompts_never_share_a_beginning():
    prompts = PromptSource(512)
    first, second = prompts.request(64, 1), prompts.request(64, 1)
    assert first.prompt_token_ids[:4] != second.prompt_token_ids[:4]
    assert first.request_id != second.request_id


def test_prefill_ends_with_the_first_token(session):
    assert prefill_seconds(session.engine, session.prompts, 20) > 0
    sweep.drain(session.engine)
    assert not session.engine.has_work


def test_closed_loop_keeps_the_asked_number_in_flight_and_counts_its_tokens(session):
    engine = session.engine
    most = 0
    step = engine.step

    def watched():
        nonlocal most
        most = max(most, len(engine.running_ids()))
        assert len(engine.running_ids()) >= 3
        return step()

    engine.step = watched
    try:
        result = closed_loop(
            engine, session.prompts, in_flight=3, input_tokens=20, output_tokens=8, requests=6
        )
    finally:
        engine.step = step
    assert most == 3
    assert len(result.first_token_ms) == len(result.token_ms) == 6
    # Three sequences give at most three tokens a step; the mean step is what a token takes.
    rate = 3 / (sum(result.token_ms) / 6 / 1e3)
    assert 0.3 * rate < result.output_tokens_per_s < 1.5 * rate
    assert not engine.has_work


def test_mixed_gaps_are_those_of_the_steps_that_carry_the_prompt(session):
    result = mixed(
        session.engine, session.prompts, batch=2, context=20, prompt_tokens=1000, quiet_steps=8
    )
    # 1000 tokens in chunks of 254 beside two decoding sequences: four steps.
    assert len(result.gaps_ms) == 2 * 4
    assert max(result.gaps_ms) <= result.prompt_ms
    assert not session.engine.has_work


def test_percentiles_are_samples():
    assert percentile([3.0, 1.0, 2.0], 10) == 1.0
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile([5.0], 99) == 5.0
    line = Origin(device="d", commit="c", command="x", config="f", clocks="-").line("prefill", [3, 1, 2])  # fmt: skip
    assert (line["p10"], line["median"], line["p90"]) == (1, 2, 3)


def test_profile_table_sums_what_it_does_not_show():
    kernels = [KernelTime(name=f"k{i}", calls=2, total_us=1000.0, share=0.01) for i in range(100)]
    lines = text(kernels).splitlines()
    assert "60 more" in lines[-2]
    assert lines[-1].split()[0] == "100.000"
