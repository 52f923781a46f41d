"""`rose bench scheduler` times what a service does, and its line says where and how."""

from __future__ import annotations

import json

from rose.bench.scheduler import report, run_scheduler
from rose.cli.main import run


def test_a_line_has_the_whole_its_stages_and_the_bare_loops(tmp_path):
    path = tmp_path / "results.jsonl"
    line = run_scheduler(sequences=4, steps=20, is_caching=True, path=path, commit="abc")
    assert json.loads(path.read_text()) == line
    assert (line["bench"], line["batch"], line["num_samples"]) == ("scheduler", 4, 20)
    stages = line["stages_us"]
    assert list(stages) == ["schedule", "inputs", "collect", "commit", "encode and send"]
    assert all(value > 0 for value in [line["median"], *stages.values(), *line["bare_us"].values()])
    assert "Python 3" in line["device"]
    assert f"{line['median']:8.1f} us" in report(line)


def test_the_command_prints_the_table(capsys):
    assert run(["bench", "scheduler", "--sequences", "2", "--steps", "5", "--no-prefix-cache"]) == 0
    assert "whole step, median" in capsys.readouterr().out
