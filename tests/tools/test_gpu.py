"""`make gpu-check`, `make gpu-bench`: every command parses, what is missing is said, an incomplete run is no pass."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rose.cli.main import cli

TOOL = Path(__file__).parents[2] / "tools" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("rose_tools_gpu", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def _steps(gpu):
    sizes, out = ["20b", "120b"], Path("results")
    return [*gpu.check_steps(sizes, "abc", out), *gpu.bench_steps(sizes, "abc", out)]


def test_every_rose_command_line_parses(gpu):
    lines = [s.words[2:] for s in _steps(gpu) if s.words[1] == "rose.cli.main"]
    assert len(lines) == 4 + 2 * 7
    for words in lines:
        # With --help at the end everything before it is parsed, and nothing is run.
        result = CliRunner().invoke(cli, [*words, "--help"])
        assert result.exit_code == 0, (words, result.output)
        context = cli.make_context("rose", list(words))
        while context.command is not None and getattr(context, "_protected_args", None):
            name, command, rest = context.command.resolve_command(
                context, [*context._protected_args, *context.args]
            )
            context = command.make_context(name, rest, parent=context)
        assert context.params.get("size") in ("20b", "120b")
        assert context.params["commit"] == "abc"


def test_steps_name_the_cells_of_the_score_table(gpu):
    words = [" ".join(s.words) for s in gpu.bench_steps(["20b", "120b"], None, Path("r"))]
    latency = [w for w in words if " latency " in w]
    assert "1,8,32,128" in latency[0]
    assert "1,8,32,96" in latency[1]
    assert not any("--commit" in w for w in words)


def test_what_is_missing_is_said_and_the_run_is_no_pass(gpu, capsys):
    steps = [
        gpu.Step("good", ("-c", "pass")),
        gpu.Step("engine", ("-c", "pass"), ("no_such_package",), ("no-such-tool",)),
    ]
    assert gpu.run(steps, is_dry=False) == 1
    told = capsys.readouterr().out
    assert "left out: no_such_package is not installed; no-such-tool is not installed" in told
    assert gpu.run(steps[:1], is_dry=False) == 0


def test_a_failing_step_stops_no_other_and_is_told(gpu, capsys):
    steps = [gpu.Step("bad", ("-c", "raise SystemExit(7)")), gpu.Step("good", ("-c", "pass"))]
    assert gpu.run(steps, is_dry=False) == 1
    told = capsys.readouterr().out
    assert "failed, exit code 7" in told
    assert "ok (" in told


def test_unknown_words_are_answered_with_the_steps_there_are(gpu, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["bench", "--only", "nothing", "--dry-run"])
    assert "20b latency" in capsys.readouterr().err
    assert gpu.main(["bench", "--only", "20b start", "--dry-run"]) == 1
    assert capsys.readouterr().out.count("== 20b start") == 2
