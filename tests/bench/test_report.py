"""Reports of result files: which line of a cell counts, what is refused, and that figures come through."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rose.bench.charts import (
    ABOVE,
    ABOVE_LEFT,
    ABOVE_RIGHT,
    BELOW,
    BELOW_LEFT,
    LOW,
    decode_lines,
    decode_points,
    draw,
    load_lines,
    place_labels,
)
from rose.bench.cost import line_cost, usd_per_million
from rose.bench.report import markdown, mixed_models, num_short, summary, verdict
from rose.bench.results import read
from rose.bench.targets import Cell, load_targets
from rose.cli.main import run
from rose.utils.errors import RoseError

TARGETS = load_targets()
LINE = {
    "bench": "prefill",
    "model": "20b",
    "tokens": 8192,
    "median": 0.1,
    "kv": "bf16",
    "distinct_experts": 31.9,
    "config": "a",
    "device": "NVIDIA H200",
    "commit": "abc",
    "date": "2026-11-30T10:00:00+00:00",
    "command": "python -m rose.cli.main bench latency",
}
CELL = ("prefill", "20b", 1, 1, 1, 8192)


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def _read(tmp_path, *lines, name="r.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read([path])


def test_figures_of_the_peer_are_those_of_its_lines():
    lines = [json.loads(x) for x in (RESULTS / "peer-20261130.jsonl").read_text().splitlines()]
    lines = [x for x in lines if "figure" in x and x.get("graph_sizes", 8) == 8]
    for cell in TARGETS.cells.values():
        wanted = {"cell": cell.bench, "model": cell.model, "unit": cell.unit, **cell.numbers}
        found = [x["figure"] for x in lines if wanted.items() <= x.items()]
        assert found == ([] if cell.peer is None else [cell.peer]), wanted
    for many in TARGETS.prefill_many:
        wanted = {"cell": "prefill_many", **many}
        figure = wanted.pop("peer_tokens_per_s")
        assert [x["figure"] for x in lines if wanted.items() <= x.items()] == [figure], wanted


def test_what_exactness_the_figures_cost_stands_before_the_tables(tmp_path):
    accuracy = {**LINE, "bench": "accuracy", "layers": 2, "relative_error_of_logits": {
        "pytorch_bf16": 0.08, "pytorch_bf16_last_tokens": 0.14, "prefill": 0.1,
        "prefill_against_rounded": 0.088, "decode_after_prefill": 0.07,
    }}  # fmt: skip
    other = {**accuracy, "model": "tiny"}
    text, _ = markdown(_read(tmp_path, LINE, accuracy, other), TARGETS).split("## gpt-oss-20b")
    measured = "prefill 1.25, or 1.10 where float32 rounds the same inputs, decode 0.50."
    assert f"in PyTorch: 20b (2 layers, random weights) {measured}" in text
    text, _ = markdown(_read(tmp_path, LINE), TARGETS).split("## gpt-oss-20b")
    assert "in PyTorch: to be measured" in text


def test_the_newest_line_of_a_cell_counts_not_the_best(tmp_path):
    newer = {**LINE, "median": 0.2, "date": "2026-11-30T11:00:00+00:00"}
    assert _read(tmp_path, newer, LINE).cells[CELL]["median"] == 0.2
    same_date = {**LINE, "median": 0.3}
    assert _read(tmp_path, LINE, same_date).cells[CELL]["median"] == 0.3


def test_made_up_kv_takes_no_cell_of_the_score_table(tmp_path):
    measured = {**LINE, "bench": "decode", "batch": 8, "context": 8192, "median": 5.0}
    made_up = {
        **measured,
        "bench": "decode_filled",
        "median": 4.0,
        "date": "2026-11-30T11:00:00+00:00",
    }
    results = _read(tmp_path, measured, made_up, {**made_up, "context": 1024, "median": 3.0})
    assert results.cells[("decode", "20b", 1, 1, 1, 8, 8192)]["median"] == 5.0
    assert decode_lines(results, "20b") == {1024: [(8, 3.0)], 8192: [(8, 5.0)]}
    text = markdown(results, TARGETS)
    [row] = [x for x in text.splitlines() if "| decode 8 x 1024 (KV made up) | 3 ms |" in x]
    assert row.endswith("| `a` | `abc` |"), "configuration and commit"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"device": "cpu"}, "no H200"),
        ({"commit": "abc-dirty"}, "differed from its commit"),
        ({"kv": "fp8_e4m3"}, "bf16 counts"),
        ({"distinct_experts": None}, "no distinct_experts"),
        ({"command": None}, "no command"),
        ({"tokens": None}, "no tokens"),
    ],
)
def test_lines_that_cannot_be_trusted_are_refused_with_the_reason(tmp_path, change, why):
    line = {k: v for k, v in {**LINE, **change}.items() if v is not None}
    results = _read(tmp_path, line)
    assert not results.cells
    assert len(results.refused) == 1
    assert why in results.refused[0]
    assert "r.jsonl:1" in results.refused[0]


LOAD = {**LINE, "bench": "load", "input_tokens": 8, "output_tokens": 4, "in_flight": 2,
        "output_tokens_per_s": 60.0, "timed": "whole requests", "first_token_ms": 9.0,
        "first_token_ms_p99": 11.0, "token_ms": 4.0, "token_ms_p99": 5.0}  # fmt: skip
MIXED = {**LINE, "bench": "mixed", "batch": 2, "context": 8, "prompt_tokens": 32, "p99": 3.0,
         "quiet_ms": 1.0, "prompt_ms": 5.0}  # fmt: skip
GROWTH = {**LINE, "bench": "growth", "steps": 10, "batch": 2, "prompt_tokens": 8, "output_tokens": 4,
          "requests": 3, "grown": dict.fromkeys(
              ("allocated_bytes", "reserved_bytes", "taken_bytes", "resident_bytes"), -1)}  # fmt: skip
KERNEL = {"bench": "kernel", "operation": "gemm", "case": "a", "implementation": "torch", "date": "x",
          "device": "NVIDIA H200", "median_us": 12.5, "tflops": 3.0, "tb_per_s": 2.0,
          "floor_us": 1.0, "share_of_limit": 0.1}  # fmt: skip
MANY = {**LINE, "bench": "prefill_many", "prompts": 2, "tokens": 8, "tokens_per_s": 100.0}
ACCURACY = {**LINE, "bench": "accuracy", "layers": 2, "relative_error_of_logits": {
    "pytorch_bf16": 0.5, "pytorch_bf16_last_tokens": 0.4, "prefill": 0.3, "decode_after_prefill": 0.1,
    "pytorch_bf16_kv_rounded": 0.5, "pytorch_bf16_kv_rounded_last_tokens": 0.4}}  # fmt: skip
DECODE = {**LINE, "bench": "decode", "batch": 8, "context": 8192}
START = {**LINE, "bench": "start", "cached": True}
EVERY = (LINE, {**LINE, "option": True}, DECODE, START, LOAD, MIXED, GROWTH, KERNEL, MANY, ACCURACY)
WRONG = (None, "x", True, [1], {"a": 1}, float("nan"), -float("inf"), 10**400)


def _changed(line, name, value):
    """A line with one field changed, or one of an object's; without it where no value is given."""
    rest = {k: v for k, v in line.items() if k != name}
    return rest if value is WRONG else {**rest, name: value}


@pytest.mark.parametrize("line", EVERY, ids=lambda x: f"{x['bench']}{x.get('option', '')}")
def test_no_field_of_any_line_makes_a_traceback(tmp_path, line):
    changed = [_changed(line, n, v) for n in line if n != "bench" for v in (*WRONG, 0, WRONG)]
    for name in ("grown", "relative_error_of_logits"):
        parts = line.get(name, {})
        changed += [
            _changed(line, name, _changed(parts, n, v)) for n in parts for v in (*WRONG, 0, WRONG)
        ]
    assert not _read(tmp_path, *EVERY).refused
    for one in changed:
        results = _read(tmp_path, *[x for x in EVERY if x is not line], one)
        markdown(results, TARGETS)
        summary(results, TARGETS)
        for lines in (results.cells.values(), results.others.get("load", [])):
            assert all(line_cost(x) is None or line_cost(x)[1] > 0 for x in lines)
        decode_points(dict(decode_lines(results, "20b")).get(8192, []), 3.0)
        load_lines(results)


@pytest.mark.parametrize(
    ("line", "name", "value", "why"),
    [
        (LINE, "median", "0.1", "median is '0.1', no number above 0"),
        (LINE, "median", 0, "median is 0, no number above 0"),
        (LINE, "date", 20261201, "date is 20261201, no text"),
        (LINE, "config", "\ud800", "config is '\\ud800', no text"),
        (LINE, "command", "a\nb", "command is 'a\\nb', no text"),
        (LINE, "distinct_experts", None, "distinct_experts is None, no number"),
        (DECODE, "batch", [8], "batch is [8], no number above 0"),
        (START, "cached", "yes", "cached is 'yes', neither true nor false"),
        (LOAD, "output_tokens_per_s", float("nan"), "output_tokens_per_s is nan, no number above"),
        (LOAD, "token_ms", WRONG, "no token_ms"),
        (GROWTH, "grown", [0], "grown is [0], no object"),
        (GROWTH, "grown", {}, "no allocated_bytes in grown"),
        (ACCURACY, "relative_error_of_logits", "x" * 99, "is 'xxx"),
        (KERNEL, "median_us", WRONG, "no median_us"),
    ],
)
def test_a_line_of_the_wrong_types_is_refused_by_its_place(tmp_path, line, name, value, why):
    results = _read(tmp_path, _changed(line, name, value), line)
    [refused] = results.refused
    assert "r.jsonl:1: " in refused
    assert why in refused
    assert len(refused) < len(str(tmp_path)) + 200
    assert results.cells or results.others, "the line behind it is taken"


def test_options_are_reported_apart_and_never_counted(tmp_path):
    results = _read(tmp_path, {**LINE, "option": True, "kv": "fp8", "median": 0.001})
    assert not results.cells
    assert not results.refused
    assert "## Options" in markdown(results, TARGETS)
    assert num_short(results, TARGETS) == len(TARGETS.cells)


def test_an_option_of_the_closed_loop_does_not_take_a_lines_place(tmp_path):
    results = _read(tmp_path, LOAD, {**LOAD, "option": True, "kv": "fp8_e4m3", "median": 0.001})
    assert [x["kv"] for x in results.others["load"]] == ["bf16"]
    assert results.num_aside == 1


def test_the_newest_load_of_a_number_in_flight_counts_however_long_it_was_timed(tmp_path):
    times = dict.fromkeys(("first_token_ms", "first_token_ms_p99", "token_ms", "token_ms_p99"), 4.0)
    load = {**LINE, "bench": "load", "input_tokens": 8, "output_tokens": 4, "in_flight": 32,
            "output_tokens_per_s": 6000.0, "timed": "what was seen, 8 s at most, first prompts made up",
            "date": "2026-12-01T09:00:00+00:00", **times}  # fmt: skip
    older = {**load, "timed": "what was seen, 4 s at most, first prompts made up",
             "output_tokens_per_s": 7000.0, "date": "2026-12-01T08:00:00+00:00"}  # fmt: skip
    computed = {**older, "timed": "what was seen, 0.5 s at most", "output_tokens_per_s": 5000.0}
    more = {**load, "in_flight": 8, "output_tokens_per_s": 2000.0}
    cpu = {**load, "device": "cpu", "output_tokens_per_s": 1.0}
    results = _read(tmp_path, load, older, computed, more, cpu)
    found = sorted(x["output_tokens_per_s"] for x in results.others["load"])
    assert found == [1.0, 2000.0, 5000.0, 6000.0]
    [lines] = load_lines(results).values()
    assert [(x["in_flight"], x["output_tokens_per_s"]) for x in lines] == [(8, 2000), (32, 6000)]


def test_a_start_line_needs_no_kv_format(tmp_path):
    start = {**LINE, "bench": "start", "cached": True, "median": 9.0}
    del start["kv"], start["distinct_experts"]
    results = _read(tmp_path, start)
    assert results.cells[("start", "20b", 1, 1, 1, True)]["median"] == 9.0


def test_cells_of_one_model_from_two_configurations_are_named(tmp_path):
    other = {**LINE, "tokens": 32768, "config": "b"}
    results = _read(tmp_path, LINE, other)
    assert mixed_models(results, TARGETS) == ["20b"]
    assert "more than one configuration" in summary(results, TARGETS)
    assert mixed_models(_read(tmp_path, LINE, {**other, "config": "a"}), TARGETS) == []


def test_the_score_table_shows_ours_beside_the_others(tmp_path):
    text = markdown(_read(tmp_path, LINE), TARGETS)
    row = next(row for row in text.splitlines() if row.startswith("| prefill 8192, s |"))
    cells = [c.strip() for c in row.strip("|").split("|")]
    assert cells[1:7] == ["0.239", "0.118", "0.118", "0.071", "0.05", "**0.1**"]
    assert cells[7:] == ["2.39", "1.18", "0.50", "must"]
    assert f"1 of {len(TARGETS.cells)} cells reach their must" in text


def test_verdicts_compare_with_must_and_goal():
    cell = Cell(key=CELL, unit="s", seed=None, peer=2.0, must=2.0, goal=1.0, floor=0.5)
    found = [verdict(cell, ours) for ours in (None, 0.9, 1.0, 2.0, 2.5)]
    assert found == ["not measured", "goal", "goal", "must", "short by 25%"]


def test_load_mixed_and_kernel_lines_have_tables(tmp_path):
    times = {
        "first_token_ms": 50.0,
        "first_token_ms_p99": 90.0,
        "token_ms": 4.0,
        "token_ms_p99": 7.5,
    }
    load = {**LINE, "bench": "load", "input_tokens": 1024, "output_tokens": 512, "in_flight": 8,
            "output_tokens_per_s": 2000.0, "timed": "whole requests", **times}  # fmt: skip
    on_cpu = {**load, "device": "cpu", "output_tokens_per_s": 40.0}
    cut = {**load, "output_tokens_per_s": 9.0, "timed": "what was seen, 20 s at most"}
    del cut["commit"]  # which a line of the closed loop can lack
    mixed = {**LINE, "bench": "mixed", "batch": 32, "context": 1024, "prompt_tokens": 32768,
             "quiet_ms": 6.0, "p99": 123.4, "prompt_ms": 1500.0}  # fmt: skip
    kernel = {"bench": "kernel", "operation": "gemm", "case": "qkv_1", "implementation": "torch",
              "median_us": 12.5, "tflops": 3.0, "tb_per_s": 2.0, "share_of_limit": 0.5, "device": "NVIDIA H200",
              "date": "x"}  # fmt: skip
    slower = {**kernel, "implementation": "triton", "median_us": 25.0}
    accuracy = {**LINE, "bench": "accuracy", "layers": 2, "tokens": 4096, "relative_error_of_logits": {
        "pytorch_bf16": 0.5, "pytorch_bf16_last_tokens": 0.4, "prefill": 0.3, "prefill_against_rounded": 0.25,
        "decode_after_prefill": 0.1}}  # fmt: skip
    foreign = {"bench": "kernel", "op": "gemm", "us": 3.0}
    many = {
        **LINE,
        "bench": "prefill_many",
        "prompts": 128,
        "tokens": 8192,
        "tokens_per_s": 154880.0,
    }
    grown = {
        "allocated_bytes": 0,
        "reserved_bytes": 2097152,
        "taken_bytes": 0,
        "resident_bytes": -524288,
    }
    growth = {**LINE, "bench": "growth", "steps": 1000, "batch": 32, "prompt_tokens": 1024,
              "output_tokens": 128, "requests": 248, "grown": grown}  # fmt: skip
    lines = (growth, load, on_cpu, cut, mixed, slower, kernel, many, accuracy, foreign)
    text = markdown(_read(tmp_path, *lines), TARGETS)
    assert (
        "| 20b | NVIDIA H200 | 1024 / 512 | 8 | 2000 | 50 (90) | 4.00 (7.50) | 0.417 | whole requests | `abc` |"
        in text
    )
    assert (
        "| 20b | cpu | 1024 / 512 | 8 | 40 | 50 (90) | 4.00 (7.50) | - | whole requests | `abc` |"
        in text
    )
    assert "| 92.593 | what was seen, 20 s at most | - |" in text, "a line of its own"
    assert "| 20b | 32 x 1024 | 32768 | 6.0 | 0.1 | 123.4 | 1.50 | `abc` |" in text
    assert "| gemm | qkv_1 | torch | 12.5 | - | 50% | 3 | 2.00 | triton 2.0x |" in text
    assert (
        "| 20b | 2 layers, 4096 tokens | 0.5 | - | 0.3 | 0.25 | 0.1 | 0.50 | 0.25 | `a` | `abc` |"
        in text
    )
    assert "| 20b | 1000 | 32 | 248 | 0.0 | 2.0 | 0.0 | -0.5 | `abc` |" in text
    assert "1 left aside" in text
    assert "| 20b | 128 x 8192 | 154880 | 77440 | 2.00 | `abc` |" in text


def test_broken_files_are_named(tmp_path):
    with pytest.raises(RoseError, match="is not a file"):
        read([tmp_path / "absent.jsonl"])
    for text in ("nope", "[" * 100_000, "1" * 5000):
        (tmp_path / "bad.jsonl").write_text(f'{{"bench": "start"}}\n{text}\n')
        with pytest.raises(RoseError, match=r"bad\.jsonl:2 is no JSON"):
            read([tmp_path / "bad.jsonl"])


def test_costs_are_those_that_the_seed_published():
    for row in TARGETS.seed_prefill:
        cost = usd_per_million(seconds=row["seconds"], tokens=row["tokens"], gpus=row["gpus"])
        # Published with three decimals of the cost and of the latency.
        assert cost == pytest.approx(row["usd_per_million"], abs=0.0011), row


def test_costs_of_lines_know_their_kind_and_gpus():
    assert line_cost(LINE)[0] == "input"
    decode = {"bench": "decode", "median": 10.0, "batch": 100, "context": 1, "tp": 4, "dp": 2,
              "device": "NVIDIA H200"}  # fmt: skip
    kind, cost = line_cost(decode)
    assert kind == "output"
    assert cost == pytest.approx(10e-3 * 8 * 3 / 3600 / 100 * 1e6)
    assert line_cost({"bench": "start", "device": "NVIDIA H200"}) is None
    assert line_cost({**decode, "device": "cpu"}) is None, "what a CPU costs is not known"
    assert decode_points([(100, 10.0)], 3.0)[0][:2] == (100.0, pytest.approx(cost / 8))


def test_report_and_charts_are_written_with_links_from_the_report(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "r.jsonl"
    decode = {**LINE, "bench": "decode", "batch": 8, "context": 8192, "median": 4.0}
    load = {**LINE, "bench": "load", "input_tokens": 8, "output_tokens": 4, "in_flight": 32,
            "output_tokens_per_s": 6000.0, "timed": "whole requests", "first_token_ms": 9.0,
            "first_token_ms_p99": 11.0, "token_ms": 4.0, "token_ms_p99": 5.0}  # fmt: skip
    path.write_text("\n".join(json.dumps(x) for x in (LINE, decode, load)))
    out, charts = tmp_path / "docs" / "results.md", tmp_path / "docs" / "charts"
    assert run(["bench", "report", str(path), "--out", str(out), "--charts", str(charts)]) == 0
    assert "2 of 20 cells" in capsys.readouterr().out
    assert "](charts/cost.png)" in out.read_text()
    assert "](charts/load.png)" in out.read_text()
    for name in ("cost.png", "prefill.png", "load.png"):
        assert (charts / name).read_bytes().startswith(b"\x89PNG")


def _labelled(points, numbers, *others):
    """An axis with one labelled curve, and others as (points, options)."""
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.plot(*zip(*points, strict=True), marker="o")
    for line, options in others:
        axis.plot(*zip(*line, strict=True), **options)
    for point, number in zip(points, numbers, strict=True):
        axis.annotate(number, point, xytext=(0, 0), textcoords="offset points", fontsize=7.5)
    axis.set_xlim(left=0)
    return figure, axis


def test_labels_of_points_that_are_close_do_not_cover_each_other():
    points = [(600.0, 500), (45.0, 5990), (26.0, 6160)]
    figure, axis = _labelled(points, ("1", "128", "256"))
    place_labels(figure, (ABOVE_RIGHT, BELOW_LEFT, BELOW, ABOVE_LEFT))
    one, *close = (label.get_window_extent() for label in axis.texts)
    assert not close[0].overlaps(close[1])
    assert one.x0 > axis.transData.transform(points[0])[0], "nothing is in the way of the first"
    assert all(box.x0 >= axis.bbox.x0 for box in close), "beyond the edge are the axis' numbers"


def test_a_label_keeps_off_curves_and_markers_of_others():
    def places(*others):
        figure, axis = _labelled([(50, 50), (100, 50)], ("17", "8"), *others)
        axis.set_ylim(0, 100)
        place_labels(figure, (ABOVE_LEFT, ABOVE, LOW))
        return axis.texts[0].xyann

    steep = [(47, 0), (47, 100)]
    alone = [(46, 53)], {"marker": "s"}
    assert places() == ABOVE_LEFT[0]
    assert places(alone) == ABOVE[0], "a curve of one point is its marker"
    assert places((steep, {"marker": ""}), ([(50, 54)], {"marker": "s"})) == LOW[0]


def test_without_a_load_there_is_no_chart_of_it(tmp_path):
    pytest.importorskip("matplotlib")
    names = [path.name for _, path in draw(_read(tmp_path, LINE), TARGETS, tmp_path)]
    assert names == ["cost.png", "prefill.png"]


def test_absent_matplotlib_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RoseError, match=r"rose-engine\[report\]"):
        draw(_read(tmp_path, LINE), TARGETS, tmp_path / "charts")
