"""`rose bench start`: children of their own, empty caches for a fresh start, refusals in words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rose.bench.start import fresh_environment, run_start, start_once
from rose.kernels.build import default_cache
from rose.utils.errors import ConfigError

TINY = {"size": "tiny", "weights": "mxfp4", "device": "cpu", "layers": 1, "kv_tokens": 1024}


def _environment() -> dict[str, str]:
    source = str(Path(__file__).parents[2] / "src")
    return {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}


def test_a_line_holds_what_the_score_table_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", _environment()["PYTHONPATH"])
    path = tmp_path / "results.jsonl"
    run_start(is_cached=False, repeats=1, path=path, commit="abc", **TINY)
    line = json.loads(path.read_text())
    assert (line["bench"], line["model"], line["cached"]) == ("start", "tiny", False)
    for name in ("config", "device", "commit", "date", "command"):
        assert line[name], name
    assert line["median"] > line["stages"]["first token"] > line["stages"]["imports"] > 0
    assert line["option"] is True  # one layer is no result


def test_a_refusal_of_the_child_is_told_in_its_words():
    with pytest.raises(ConfigError) as caught:
        start_once({**TINY, "weights": "nope", "kv": "no"}, environment=_environment())
    first, second = caught.value.problems
    assert first.startswith("weights='nope' is not a format")
    assert second.startswith("kv='no' is not a format")


def test_a_fresh_start_finds_no_kernel_cache(tmp_path, monkeypatch):
    for name, value in fresh_environment(_environment(), tmp_path).items():
        monkeypatch.setenv(name, value)
    assert default_cache().is_relative_to(tmp_path)
    caches = ("TRITON_CACHE_DIR", "TRITON_HOME", "CUDA_CACHE_PATH", "XDG_CACHE_HOME", "HOME")
    assert all(Path(os.environ[name]).is_relative_to(tmp_path) for name in caches)


def _child(pid: int) -> Path:
    """Wait until a process has a child that is past exec, and return its status file."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if Path(f"/proc/{word}/cmdline").read_bytes().startswith(b"sleep"):
                return Path(f"/proc/{word}/status")
        time.sleep(0.01)
    raise AssertionError("no child was started")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_whatever_ends_it_ends_its_child(number, tmp_path):
    endless = tmp_path / "python"  # in the place of Python: a child that would not end by itself
    endless.write_text("#!/bin/sh\nexec sleep 60\n")
    endless.chmod(0o700)
    folder = tmp_path / "temporary"
    folder.mkdir()
    program = (
        "import sys\nfrom rose.bench.start import run_start\n"
        f"sys.executable = {str(endless)!r}\n"
        f"run_start(is_cached=False, repeats=1, path=None, commit='abc', **{TINY})"
    )
    environment = _environment() | {"TMPDIR": str(folder)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as tool:
        status = _child(tool.pid)
        assert list(folder.iterdir())
        tool.send_signal(number)
        code = tool.wait(10)
    deadline = time.monotonic() + 10
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.01)
    if number != signal.SIGKILL:  # which leaves nobody who could clear up
        assert code == 128 + number
        assert not list(folder.iterdir())
