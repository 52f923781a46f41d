"""`rose serve` builds both trees from its options and says what is wrong before it starts anything."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from rose.cli import main as cli_main
from rose.cli import serve as cli_serve
from rose.cli.options import parameter_name
from rose.config import cli as config_cli
from rose.config.engine import EngineConfig
from rose.frontend.config import FrontendConfig
from rose.utils.errors import ConfigError


@pytest.fixture
def launched(monkeypatch):
    """Run command lines without starting processes; return what would have been started."""
    found = []

    def run(launch, config):
        found.append((launch, config))
        return 0

    monkeypatch.setattr(cli_serve, "run", run)

    def start(*arguments):
        assert cli_main.run(["serve", *map(str, arguments)]) == 0
        return found[-1]

    return start


def test_the_two_trees_share_no_option():
    flags = [f for o in config_cli.options(FrontendConfig, EngineConfig) for f in o.flags]
    names = [parameter_name(o.path) for o in config_cli.options(FrontendConfig, EngineConfig)]
    assert len(set(flags)) == len(flags)
    assert len(set(names)) == len(names)


def test_options_reach_both_trees(launched, tmp_path):
    options = (
        "--page_tokens",
        32,
        "--scheduler.max-sequences",
        4,
        "--no-use-graphs",
        "--only",
        "gemm=torch",
    )
    launch, config = launched(
        tmp_path, *options, "--port", 0, "--served-model-name", "a", "--served-model-name", "b"
    )
    command = launch.command("ipc:///tmp/x", tmp_path)
    engine = json.loads(next(word for word in command if word.startswith("{")))
    assert (engine["cache"]["page_tokens"], engine["scheduler"]["max_sequences"]) == (32, 4)
    assert engine["use_graphs"] is False
    assert engine["kernels"]["only"] == {"gemm": "torch"}
    assert engine["model"] == str(tmp_path)
    assert config.port == 0
    assert launch.model_names == ("a", "b")


def test_a_model_is_called_as_its_folder(launched, tmp_path):
    folder = tmp_path / "gpt-oss-20b"
    folder.mkdir()
    launch, _ = launched(folder)
    assert launch.model_names == ("gpt-oss-20b",)


def test_a_script_needs_no_model(launched, tmp_path):
    script = tmp_path / "s.jsonl"
    script.write_text('{"tokens": [1, 2]}\n')
    launch, _ = launched("--scripted", script, "--context-tokens", 99)
    command = launch.command("ipc:///tmp/x", tmp_path)
    assert command[1:3] == ["-m", "rose.server.scripted"]
    written = json.loads((tmp_path / "script.json").read_text())
    assert written["address"] == "ipc:///tmp/x"
    assert written["context_tokens"] == 99
    assert written["lines"][0]["tokens"] == [1, 2]
    assert launch.model_names == ("scripted",)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["no-such-folder"], ["no-such-folder", "found nothing"]),
        (["--page-tokens", "3", "--port", "99999"], ["page_tokens=3", "port=99999"]),
        (["--log-level", "LOUD"], ["LOUD", "DEBUG"]),
        (["--conversation-date", "yesterday"], ["conversation_date='yesterday'"]),
        (["--port", "abc"], ["--port"]),
        (["--only", "gemm"], ["NAME=VALUE"]),
        (["--page-token", "3"], ["--page-tokens"]),
        (["--scripted", "no-such-file"], ["no-such-file"]),
        (["--device", "gpu"], ["'gpu'", "auto, cpu, cuda", "change --device"]),
        (["--tp", "2"], ["tp=2", "leave out --tp"]),
        (["--decoder", "x"], ["'x'", "plain", "change --decoder (decoding.decoder)"]),
        (["--context-tokens", "0"], ["context_tokens=0", "change --context-tokens"]),
        (["--context-tokens", "200000"], ["the model takes 131072", "change --context-tokens"]),
        (["--seed", str(2**63)], [f"seed={2**63}; allowed: a signed 64-bit", "change --seed"]),
        (["--only", "gem=x"], ["gem", "gemm", "change --only (kernels.only)"]),
        (
            ["--only", "gemm=triton", "--only", "gemm=torch"],
            ["--only: gemm is given 2 times, as triton and as torch; give it once"],
        ),
        # As a shell writes "$UNSET": the server would be open, or speak plain HTTP.
        (
            ["--api-key", "", "--api-key-file", "", "--ssl-certfile", ""],
            ["--api-key, --api-key-file, --ssl-certfile: found an empty text"],
        ),
        (["--served-model-name", ""], ["--served-model-name: found an empty text"]),
        (["--weights", ""], ["--weights: found an empty text"]),
        (["--weights", "int3"], ["'int3'", "change --weights (quant.weights)"]),
    ],
)
def test_mistakes_are_said_before_anything_starts(arguments, parts, capsys):
    assert cli_main.run(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert all(part in error for part in parts), error
    assert "Traceback" not in error
    assert "listening" not in error


def test_what_can_be_checked_without_torch_is(capsys):
    program = (
        "import sys\nfrom rose.cli.main import run\n"
        "code = run(['serve', '--tp', '2', '--decoder', 'x', '--only', 'gem=x', '--context-tokens', '200000'])\n"
        "sys.exit('torch' in sys.modules or code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert result.returncode == 2, result.stderr
    assert [line.startswith("error: ") for line in result.stderr.splitlines()] == [True] * 4


def test_a_refusal_of_the_engine_is_told_once_in_the_words_of_the_command_line():
    arguments = ["serve", "--port", "0", "--device", "cpu", "--only", "gemm=no_such"]
    result = subprocess.run(
        [sys.executable, "-m", "rose.cli.main", *arguments],
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    told = [line for line in result.stderr.splitlines() if "no_such" in line]
    assert len(told) == 1, result.stderr
    assert told[0].startswith("error: ")
    assert told[0].endswith("change --only (kernels.only)")
    assert "loading weights" not in result.stderr


def test_engine_options_are_refused_for_a_script(tmp_path, capsys):
    script = tmp_path / "s.jsonl"
    script.write_text('{"tokens": [1]}\n')
    assert cli_main.run(["serve", "--scripted", str(script), "--page-tokens", "32"]) == 2
    assert "--cache.page-tokens" in capsys.readouterr().err


def test_without_an_embedded_model_a_folder_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(cli_serve, "EMBEDDED_MODEL", tmp_path / "none")
    with pytest.raises(ConfigError, match="give the folder"):
        cli_serve.model_launch(None, {}, FrontendConfig(), log_level="INFO")


def test_a_folder_that_holds_no_model_is_refused_before_anything_starts(tmp_path, capsys):
    assert cli_main.run(["serve", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: model '{tmp_path}': found no config.json there")
    assert "listening" not in error


def test_without_torch_serve_names_the_extra_before_anything_starts(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        cli_serve.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "torch" else find_spec(name, *rest),
    )
    assert cli_main.run(["serve"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: this command needs torch")
    assert "rose-engine[engine]" in error
    assert "listening" not in error
