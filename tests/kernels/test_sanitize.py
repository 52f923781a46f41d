"""The sanitizer is started over the right checks, and its verdict is that of the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.cli import main as cli
from rose.kernels import build, sanitize
from rose.kernels.__main__ import main
from rose.kernels.check import check_all
from rose.kernels.registry import load
from rose.utils.device import CPU

FAKE = """#!/bin/sh
echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $@" > "$(dirname "$0")/asked"
exit 3
"""


def test_sanitize_runs_small_cases_uncached_and_returns_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(FAKE)
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize.shutil, "which", {tool.name: str(tool)}.get)
    assert main(["sanitize", "attention_prefill", "--only", "cuda", "--few", "3"]) == 3
    words = (tmp_path / "asked").read_text().split()
    assert words[0] == "1"
    assert words[1:5] == ["--tool", "memcheck", "--error-exitcode", "3"]
    asked = " ".join(words[words.index("check") :])
    assert asked.startswith("check --device cuda --small --toolchain cuda attention_prefill")
    assert asked.endswith("--only cuda --few 3")
    assert main(["sanitize", "--tool", "racecheck"]) == 3
    assert (tmp_path / "asked").read_text().split()[1:3] == ["--tool", "racecheck"]


def test_what_is_sanitized_is_a_command_that_check_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(build, "_defines_of_all", [])
    command, _ = sanitize.sanitizer_command(
        ["quantize_activation", "--few", "1"], toolchain="torch", tool="racecheck"
    )
    here = ["cpu" if word == "cuda" else word for word in command[command.index("check") :]]
    assert main(here) == 0
    assert build._defines_of_all == ["ROSE_RACECHECK"]


def test_operations_may_stand_behind_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--few", "1", "rms_norm", "--small", "quantize_activation"]
    assert cli.run(["kernels", "check", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    checked = {line.split()[1].split("/")[0] for line in lines if line.startswith("ok")}
    assert checked == {"rms_norm", "quantize_activation"}


def test_absent_sanitizer_is_an_error_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize.shutil, "which", lambda _name: None)
    monkeypatch.setattr(sanitize, "USUAL", tmp_path / "absent")
    assert main(["sanitize"]) == 2
    assert "compute-sanitizer" in capsys.readouterr().err


def test_check_can_be_narrowed_to_a_toolchain_and_small_cases() -> None:
    load("quantize_activation")
    outcomes = list(
        check_all(CPU, operations=["quantize_activation"], toolchain="torch", is_small=True)
    )
    everything = list(check_all(CPU, operations=["quantize_activation"]))
    assert {o.implementation for o in outcomes} == {"torch"}
    assert {o.case for o in outcomes} < {o.case for o in everything}
