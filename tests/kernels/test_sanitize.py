"""The sanitizer is started over the right checks, and its verdict is that of the command."""

from __future__ import annotations

import importlib
import json
import re
import time
from pathlib import Path

import pytest

from rose.cli import main as cli
from rose.kernels import __main__ as kernels
from rose.kernels import build, sanitize
from rose.kernels.__main__ import main
from rose.kernels.check import cases_module, check_all
from rose.kernels.registry import load
from rose.utils.device import CPU, DeviceFacts
from rose.utils.errors import RoseError

H200 = DeviceFacts(kind="cuda", name="H200", capability=(9, 0))

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


PASSES = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/asked"
case "$*" in
  *--help*) exit 0 ;;
  *fp8_prefill_slabs*) echo "ok a"
    echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"; exit 0 ;;
  *"cuda_swapped --case mxfp4_prefill_rows_65"*) exec sleep 60 ;;
  *cuda_swapped*) echo "========= Error: Race reported between Write access and Read access"
    echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"; exit 3 ;;
  *) exit 0 ;;
esac
"""


def test_each_case_has_a_verdict_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(PASSES)
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize.shutil, "which", {tool.name: str(tool)}.get)
    monkeypatch.setattr(kernels, "detect", lambda _kind: H200)
    monkeypatch.setattr(build.CudaLibrary, "refusal", lambda _library: None)
    monkeypatch.setattr(sanitize.aot, "cuda_libraries", lambda _name: [])
    monkeypatch.setattr(build, "_defines_of_all", [])
    lines = tmp_path / "lines.jsonl"
    words = ["sanitize", "moe_experts", "--tool", "racecheck", "--jobs", "4", "--limit", "2"]
    assert main([*words, "--json", str(lines), "--commit", "abc"]) == 1
    found = {(o["implementation"], o["case"]): o for o in map(json.loads, lines.open())}
    verdicts = {key: o["verdict"] for key, o in found.items()}
    assert verdicts["cuda_fused", "fp8_prefill_slabs"] == "clean"
    assert verdicts["cuda_swapped", "mxfp4_prefill_rows_65"] == "cut off"
    assert verdicts["cuda_swapped", "mxfp4_prefill_long_widths"] == "reported"
    assert "Race reported" in found["cuda_swapped", "mxfp4_prefill_long_widths"]["told"]
    # Passed, but the tool said nothing.
    assert verdicts["cuda_wide", "mxfp4_prefill_long_widths"] == "failed"
    shapes = importlib.import_module("rose.kernels.moe_experts.cuda_e4m3_impl").SHAPES
    stages = {case for implementation, case in verdicts if implementation == "e4m3_stages"}
    assert stages == {f"shape {number}" for number in range(len(shapes))}
    assert {o["commit"] for o in found.values()} == {"abc"}
    for line in (tmp_path / "asked").read_text().splitlines():
        assert "--help" in line or "--define ROSE_RACECHECK --define ROSE_BLOCKS=2" in line


def test_what_ends_the_trials_ends_their_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho $$ >> "$(dirname "$0")/begun"\nexec sleep 60\n')
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: str(tool))
    quick = sanitize.Trial(implementation="one", case="quick", words=("-c", "pass"))
    slow = sanitize.Trial(implementation="one", case="slow", words=("-c", "pass"))
    begin = time.perf_counter()
    limits = {"quick": 1.0, "slow": 60.0}
    run_trial = sanitize.run_trial
    monkeypatch.setattr(
        sanitize, "run_trial", lambda t, **o: run_trial(t, **{**o, "limit": limits[t.case]})
    )
    verdicts = sanitize.run_trials([quick, slow], tool="racecheck", jobs=2, limit=60)
    assert next(verdicts).verdict == "cut off"
    with pytest.raises(KeyboardInterrupt):
        verdicts.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert time.perf_counter() - begin < 30
    begun = [int(line) for line in (tmp_path / "begun").read_text().split()]
    assert len(begun) == 2
    assert not [pid for pid in begun if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("code", "text", "verdict"),
    [
        (0, "ok\n========= ERROR SUMMARY: 0 errors\n", "clean"),
        (0, "ok\n", "failed"),
        (0, "0 ok, 1 skipped\n========= ERROR SUMMARY: 0 errors\n", "failed"),
        (0, "========= ERROR SUMMARY: 10 errors\n", "failed"),
        (1, "failed\n========= ERROR SUMMARY: 0 errors\n", "failed"),
        (3, "========= Invalid read\n========= ERROR SUMMARY: 2 errors\n", "reported"),
        (None, "========= Invalid read\n", "cut off"),
    ],
)
def test_clean_is_what_the_tool_says_of_a_program_that_passed(
    code: int | None, text: str, verdict: str
) -> None:
    assert sanitize.judged(code, text)[0] == verdict


def test_the_words_that_choose_our_kernels_are_in_all_their_names() -> None:
    folder = Path(sanitize.__file__).parent
    is_named: dict[str, list[bool]] = {}
    for path in (*folder.rglob("*.cuh"), *folder.rglob("*.cu")):
        before, kernel, _ = path.read_text().partition("__global__")
        if kernel:
            # A name inside `namespace rose` is mangled to _ZN4rose..., one inside `namespace {` is not.
            spaces = re.findall(r"^namespace (.*)\{", before, re.MULTILINE)
            is_named.setdefault(path.parent.name, []).append(
                bool(spaces) and spaces[-1].startswith("rose::")
            )
    assert len(is_named["moe_experts"]) >= 8
    assert {name for name, found in is_named.items() if all(found)} == sanitize.NAMED
    assert sanitize.OURS == "4rose"


def test_what_the_tool_would_pass_over_is_not_called_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "is_runnable", lambda *_: None)
    monkeypatch.setattr(sanitize.aot, "cuda_libraries", lambda _name: [])
    case = next(c for c in cases_module("moe_route").CASES if not c.large).name
    with pytest.raises(RoseError, match="moe_route was to be looked at side by side"):
        sanitize.trials_of(["moe_route"], CPU, case_name=case)


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
