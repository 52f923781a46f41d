"""`rose bench` and `rose cost`: options that make no sense are refused in words, figures are those of the formula."""

from __future__ import annotations

import json

import pytest

from rose.bench.session import Session
from rose.cli.main import run
from rose.cli.options import OutputFile


def _error(capsys, *arguments: str) -> str:
    assert run(list(arguments)) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["bench", "prefill", "--tokens", "12,x"], "whole numbers"),
        (["bench", "decode", "--batches", "0"], "whole numbers"),
        (["bench", "decode", "--batches", "1,"], "whole numbers"),
        (["bench", "decode", "--batches", "1,,2"], "whole numbers"),
        (["bench", "latency", "--only", "gemm"], "operation=implementation"),
        (
            ["bench", "latency", "--only", "gemm=triton", "--only", "gemm=torch"],
            "gemm is given 2 times, as triton and as torch; give it once",
        ),
        (["bench", "load", "--output-tokens", "1"], "x>=2"),
        (["bench", "report"], "FILES"),
        (["bench", "report", "absent.jsonl"], "absent.jsonl is not a file"),
        (["bench", "load", "--seconds", "nan"], "'nan' is no finite number"),
        (["bench", "load", "--seconds", "inf"], "'inf' is no finite number"),
        (["bench", "load", "--seconds", "0"], "x>0"),
        (["bench", "accuracy", "--most", "-1"], "x>0"),
        (["bench", "accuracy", "--seed", "-1"], "0<=x<=9223372036854775807"),
        (["bench", "accuracy", "--seed", str(2**63)], "0<=x<=9223372036854775807"),
        (["synth", "x", "--seed", str(2**64)], "0<=x<=9223372036854775807"),
        (["bench", "prefill", "--layers", "0"], "x>=1"),
        (["bench", "prefill", "--layers", "99"], "layers=99 was asked of tiny, which has 6"),
        (["bench", "load", "--json", f"{__file__}/x"], f"{__file__} is a file"),
        (["bench", "load", "--json", "/proc/x.json"], "/proc/x.json cannot be written: /proc "),
        (["bench", "load", "--json", "/proc/x/y.json"], "cannot be written: /proc "),
        (["bench", "load", "--json", ""], "a file without a name cannot be written"),
        (["bench", "accuracy", "--tokens", "8", "--decoded", "8"], "7 or fewer; lower --decoded"),
        (["bench", "prefill", "--size", "7b"], "'20b', '120b', 'tiny'"),
        (["cost"], "nothing to price"),
        (["cost", "--seconds", "1"], "--tokens is missing"),
        (["cost", "--seconds", "0", "--tokens", "1"], "x>0"),
        (["cost", "a.jsonl", "--seconds", "1", "--tokens", "1"], "give one of them"),
        (["cost", "a.jsonl", "--gpus", "2"], "belongs to --seconds"),
    ],
)
def test_wrong_options_are_refused_in_words(arguments, word, capsys):
    assert word in _error(capsys, *arguments)


def test_a_kernel_that_is_not_there_is_refused_before_weights_are_drawn(capsys):
    said = _error(capsys, "bench", "decode", "--size", "20b", "--only", "moe_experts=cuda_decoder")
    assert "moe_experts=cuda_decoder: no such implementation; known: cuda_decode, " in said
    assert "drawing" not in said


def test_a_link_to_a_file_that_is_not_there_is_written_through(tmp_path):
    link, target = tmp_path / "link.jsonl", tmp_path / "target.jsonl"
    link.symlink_to(target)
    assert OutputFile().convert(str(link), None, None) == link
    assert link.is_symlink()
    assert not target.exists(), "trying leaves everything as it was"


def test_a_link_to_itself_is_refused_before_anything_is_measured(tmp_path, capsys):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert f"{loop} is a link to nothing" in _error(capsys, "bench", "load", "--json", f"{loop}/x")


def test_cost_of_a_latency(capsys):
    assert run(["cost", "--seconds", "0.19", "--tokens", "8192", "--gpus", "2"]) == 0
    assert capsys.readouterr().out == "0.0387 USD per million tokens\n"


def test_cost_of_result_files_names_what_was_not_taken(tmp_path, capsys):
    line = {"bench": "decode", "model": "20b", "batch": 128, "context": 8192, "median": 15.54, "kv": "bf16",
            "distinct_experts": 32.0, "config": "a", "device": "NVIDIA H200", "commit": "c", "date": "d",
            "command": "x"}  # fmt: skip
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "device": "cpu"}))
    assert run(["cost", str(path), "--price", "6"]) == 0
    told = capsys.readouterr()
    assert "decode 128 x 8192" in told.out
    assert "0.2023 USD per million output tokens" in told.out
    assert "no H200" in told.err


def test_what_has_no_price_is_said_and_not_priced(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    line = {"bench": "load", "model": "tiny", "input_tokens": 20, "output_tokens": 40, "in_flight": 2,
            "timed": "whole requests", "output_tokens_per_s": 100.0, "device": "cpu", "token_ms": 9.0,
            "token_ms_p99": 9.0, "first_token_ms": 9.0, "first_token_ms_p99": 9.0}  # fmt: skip
    path.write_text(json.dumps(line))
    assert run(["cost", str(path)]) == 0
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "not priced: tiny load 20/40, 2 in flight: device 'cpu' is no H200\n"


TINY = ["--size", "tiny", "--device", "cpu", "--layers", "1", "--kv-tokens", "4096"]


def test_the_help_of_a_load_says_what_is_left_out(capsys):
    assert run(["bench", "load", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "what the engine cannot run side by side (scheduler.max_sequences, the KV cache) is left out"
        in told
    )


@pytest.mark.parametrize("part", ["prefill", "decode", "load", "latency", "sweep"])
def test_the_help_says_for_what_its_numbers_are(part, capsys):
    assert run(["bench", part, "--help"]) == 0
    assert "The usual numbers are for a large GPU. On a CPU" in capsys.readouterr().out


def test_cells_that_fail_are_lines_and_the_others_go_on(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    arguments = ["bench", "load", *TINY, "--input-tokens", "20", "--output-tokens", "40"]
    arguments += ["--in-flight", "1,300,2", "--seconds", "1e-9", "--json", str(path)]
    assert run(arguments) == 1
    out = " ".join(capsys.readouterr().out.split())  # words wrap where the terminal ends
    assert "left out: load 20/40, 300 in flight: 300 sequences, the engine runs 256" in out
    for number in (1, 2):
        assert (
            f"failed: load 20/40, {number} in flight: no request of {number} in flight had" in out
        )
    assert not path.exists()
    # More prompts than may wait are refused, not waited for.
    assert run(["bench", "prefill", *TINY, "--tokens", "4", "--prompts", "1025"]) == 1
    assert "failed: prefill 1025 prompts of 4: queue_full" in capsys.readouterr().out


def test_many_prompts_are_measured_from_the_command_line(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    arguments = ["bench", "prefill", "--size", "tiny", "--device", "cpu", "--layers", "1"]
    arguments += ["--tokens", "30,200000", "--prompts", "3", "--repeats", "1", "--kv-tokens", "512"]
    arguments += ["--max-step-tokens", "256", "--max-mixed-tokens", "256", "--json", str(path)]
    assert run(arguments) == 1
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert line["tokens_per_s"] == pytest.approx(90 / line["median"], rel=1e-3)
    told = capsys.readouterr().out
    assert "left out: prefill 3 prompts of 200000" in told
    assert "failed: prefill_many with tokens=200000" in told


@pytest.mark.parametrize(
    ("words", "failed"),
    [
        (["growth", "--batch", "300"], "growth: all its cells were left out"),
        (["mixed", "--prompt-tokens", "5000"], "mixed: all its cells were left out"),
        (["prefill", "--tokens", "200000"], "prefill: all its cells were left out"),
        # Of a grid some cells may be left out, all of a number that was typed may not.
        (["decode", "--batches", "1,300", "--context", "8,5000"], "decode with batch=300: all"),
        (["decode", "--batches", "1,300", "--context", "8,5000"], "decode with context=5000: all"),
        (["decode", "--batches", "1,3", "--context", "8,2000"], None),
        (["decode", "--batches", "1"], None),  # one of the usual contexts is too long
    ],
)
def test_what_was_asked_for_and_left_out_is_no_pass(words, failed, monkeypatch, capsys):
    monkeypatch.setattr(Session, "_decode", lambda *_arguments, **_options: None)
    tiny = ["--size", "tiny", "--device", "cpu", "--layers", "2", "--kv-tokens", "4096"]
    if words == ["decode", "--batches", "1"]:
        tiny[-1] = "10000"
    part, *more = words
    for line in (["bench", part, *tiny, *more], ["bench", "sweep", *tiny, *words]):
        assert run(line) == (failed is not None)
        told = capsys.readouterr().out
        assert "left out: " in told
        assert ("failed: " in told) == (failed is not None)
        assert failed is None or f"failed: {failed}" in " ".join(told.split())


def test_a_disk_that_is_full_costs_no_figure(capsys):
    arguments = ["bench", "prefill", *TINY, "--tokens", "20", "--repeats", "1"]
    assert run([*arguments, "--json", "/dev/full"]) == 2
    error = capsys.readouterr().err
    assert "error: /dev/full cannot be written (No space left on device); it lacks {" in error
    assert '"tokens": 20' in error


def test_a_file_to_be_written_is_tried_and_left_as_it_was(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    assert "layers=99" in _error(capsys, "bench", "prefill", "--layers", "99", "--json", str(path))
    assert not list(tmp_path.iterdir())
    path.write_text("a line\n")
    assert "layers=99" in _error(capsys, "bench", "prefill", "--layers", "99", "--json", str(path))
    assert path.read_text() == "a line\n"


def test_a_sweep_measures_its_parts_on_one_engine(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    arguments = ["bench", "sweep", "--size", "tiny", "--device", "cpu", "--layers", "1"]
    arguments += ["--kv-tokens", "4096", "--json", str(path)]
    arguments += ["decode", "--batches", "1,2", "--context", "64", "--fill", "--repeats", "1"]
    arguments += ["prefill", "--tokens", "30", "--prompts", "2", "--repeats", "1"]
    arguments += ["mixed", "--batch", "2", "--context", "20", "--prompt-tokens", "600"]
    arguments += ["--repeats", "1", "growth", "--steps", "20", "--batch", "2"]
    arguments += ["--prompt-tokens", "16", "--output-tokens", "4"]
    arguments += ["load", "--input-tokens", "16", "--output-tokens", "8", "--in-flight", "2"]
    assert run([*arguments, "--rounds", "1"]) == 0
    told = capsys.readouterr()
    assert told.err.count("gpt-oss-tiny built") == 1
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    kinds = ["decode_filled", "decode_filled", "prefill_many", "mixed", "growth", "load"]
    assert [line["bench"] for line in lines] == kinds
    assert lines[4]["grown"].keys() == lines[4]["before"].keys()
    assert lines[3]["p99"] >= lines[3]["median"] > 0


def test_a_sweep_refuses_what_is_no_part(capsys):
    assert "No such command 'start'" in _error(capsys, "bench", "sweep", "start")
    assert "Missing command" in _error(capsys, "bench", "sweep", "--size", "tiny")


@pytest.mark.parametrize(
    "words",
    [
        ["decode", "--fill"],
        ["load", "--fill"],
        ["sweep", "prefill", "decode", "--fill"],
        ["sweep", "mixed", "load", "--fill", "prefill"],
    ],
)
def test_made_up_prompts_without_a_cache_are_refused_before_anything_is_built(
    words, monkeypatch, capsys
):
    monkeypatch.setattr(Session, "__init__", lambda *_, **__: pytest.fail("built an engine"))
    told = _error(capsys, "bench", words[0], "--no-prefix-cache", *words[1:])
    assert "--fill was asked for without a prefix cache" in told
