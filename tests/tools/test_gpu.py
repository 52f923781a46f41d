"""`make gpu-check`, `make gpu-bench`: every command parses, a plan holds to its budget, what did not run is no pass."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from rose.bench import accuracy, run, start
from rose.cli.main import cli
from rose.kernels import registry, sanitize
from rose.kernels.build import CudaLibrary
from rose.utils.device import DeviceFacts

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "gpu.py"
LIMIT_SECONDS = 60
"""Of a process that a test waits for."""


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("rose_tools_gpu", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def _asked(gpu, *sizes, **more):
    return gpu.Asked(sizes=sizes or ("20b", "120b"), out=Path("results"), **more)


def _step(gpu, name, program, *, seconds=1, **more):
    needs = {"packages": (), "tools": ()} | more
    return gpu.Step(name=name, words=("-c", program), seconds=seconds, **needs)


@pytest.fixture
def measured(monkeypatch):
    """What the commands would have measured: (parts, options of the engine)."""
    found = []
    errors = ("pytorch_bf16", "pytorch_bf16_last_tokens", "prefill", "decode_after_prefill")

    def accurate(**options):
        found.append(([], options))
        return {"relative_error_of_logits": dict.fromkeys(errors, 1.0)}

    monkeypatch.setattr(run, "run_parts", lambda parts, **o: found.append((parts, o)))
    monkeypatch.setattr(start, "run_start", lambda **o: found.append(([], o)))
    monkeypatch.setattr(accuracy, "run_accuracy", accurate)
    return found


def test_every_rose_command_line_is_taken(gpu, measured):
    asked = _asked(gpu, commit="abc")
    steps = [*gpu.check_steps(asked), *gpu.bench_steps(asked)]
    lines = [s.words[2:] for s in steps if s.words[2] == "bench"]
    assert len(lines) == 6 + 2 * 7
    for words in lines:
        result = CliRunner().invoke(cli, [w.replace(gpu.UNTIL, "60") for w in words])
        assert result.exit_code == 0, (words, result.output)
    assert len(measured) == len(lines)
    for _, options in measured:
        assert options["size"] in ("20b", "120b")
        assert options["commit"] == "abc"
        assert options["device"] == "cuda"
        assert options["path"].parent == Path("results").absolute()


def test_steps_are_those_of_the_sizes_that_were_asked_for(gpu):
    names = [s.name for s in gpu.bench_steps(_asked(gpu, "20b"))]
    assert "20b sweep" in names
    assert not any("120b" in name for name in names)


def test_table_and_sweep_have_every_cell_that_was_to_be_measured(gpu, measured):
    cells = {}
    for size in ("20b", "120b"):
        steps = {s.name: s for s in gpu.bench_steps(_asked(gpu, size))}
        for name in ("table", "sweep"):
            words = [w.replace(gpu.UNTIL, "60") for w in steps[f"{size} {name}"].words[2:]]
            assert CliRunner().invoke(cli, words).exit_code == 0
            parts, options = measured.pop()
            assert options["until"] == 60
            found = [(c.func.__name__.strip("_"), c.keywords) for part in parts for c in part]
            cells.setdefault(size, []).extend(found)
    # Eight samples of the two cells out of line come before anything that a short run may not reach.
    first = [k for n, k in cells["20b"] if n == "decode" and k["is_filled"]][:2]
    assert [(k["batch"], k["context"], k["repeats"]) for k in first] == [
        (48, 32768, 8),
        (17, 128000, 8),
    ]
    for size, largest in (("20b", 128), ("120b", 96)):
        prefill = [k["tokens"] for n, k in cells[size] if n == "prefill"]
        decode = [k for n, k in cells[size] if n == "decode"]
        many = [(k["num_prompts"], k["tokens"]) for n, k in cells[size] if n == "prefill_many"]
        load = {(k["input_tokens"], k["in_flight"]) for n, k in cells[size] if n == "load"}
        assert prefill == [8192, 32768, 65536, 128000]
        real = [(k["batch"], k["context"]) for k in decode if not k["is_filled"]]
        assert real == [(b, 8192) for b in (1, 8, 32, largest)]
        filled = {(k["batch"], k["context"]) for k in decode if k["is_filled"]}
        wanted = {(b, c) for b in (2, 5, 17, 48) for c in (1024, 32768, 128000)}
        # More than the 20b's KV cache: a number all of whose cells are left out would count as a failure.
        assert wanted - filled <= {(48, 128000)}
        assert many == [(largest, 8192)]
        assert load == {(t, 2**i) for t in (1024, 8192) for i in range(9)}
        mixed = next(k for n, k in cells[size] if n == "mixed")
        assert (mixed["batch"], mixed["prompt_tokens"]) == (32, 32768)
        assert next(k for n, k in cells[size] if n == "growth")["steps"] == 1000


def test_scripts_are_there_and_take_their_words(gpu):
    asked = _asked(gpu, commit="abc")
    steps = [s for s in [*gpu.check_steps(asked), *gpu.bench_steps(asked)] if s.words[0] != "-m"]
    trials = (ROOT / "benchmarks/unbound/README.md").read_text()
    assert {Path(s.words[0]).name for s in steps} >= {
        "design_points.py", "prefill_timeline.py", "grammar_engine.py", "memory_plan.py",
        "attention_decode_splits.py",
        # Commands of the page's first block decide; those further in are for whoever has read a decision.
        *re.findall(r"^ {4}PYTHONPATH=src python benchmarks/(\w+\.py)", trials, re.MULTILINE),
    }  # fmt: skip
    for step in steps:
        if "bench" in step.words:
            continue  # the words behind it are rose's own: the test above takes them
        text = (ROOT / step.words[0]).read_text()
        for word in step.words[1:]:
            assert not word.startswith("--") or f'"{word}"' in text, (step.name, word)


def test_every_cuda_kernel_is_looked_at_for_races(gpu, monkeypatch):
    monkeypatch.setattr(CudaLibrary, "refusal", lambda _library: None)
    monkeypatch.setattr(sanitize.aot, "cuda_libraries", lambda _name: [])
    h200 = DeviceFacts(kind="cuda", name="H200", capability=(9, 0))
    words = [s.words for s in gpu.check_steps(_asked(gpu)) if s.name.startswith("racecheck")]
    functions = {
        operation: {
            i.name: i.function for i in registry.implementations(operation) if i.toolchain == "cuda"
        }
        for operation in registry.operation_names()
    }
    covered = set()
    for line in words:
        operation, *more = line[line.index("racecheck") + 1 :]
        chosen = [more[1]] if more else functions[operation]
        if "--jobs" in more:
            trials = sanitize.trials_of([operation], h200)
            chosen = {t.implementation for t in trials} - {"e4m3_stages"}
            if operation == "moe_experts":
                assert len(chosen) < len(trials), "the E4M3 experts have a module of their own"
                covered.add(functions[operation]["cuda_e4m3"])
        covered |= {functions[operation][name] for name in chosen}
    # Some are registered under two names, for two ranges of tokens.
    assert covered == {f for names in functions.values() for f in names.values()}


def test_what_is_missing_is_said_and_the_run_is_no_pass(gpu, capsys):
    steps = [
        _step(gpu, "good", "pass"),
        _step(gpu, "engine", "pass", packages=("no_such_package",), tools=("no-such-tool",)),
    ]
    assert gpu.run(steps, is_dry=False) == 1
    told = capsys.readouterr().out
    assert "left out: no_such_package is not installed; no-such-tool is not installed" in told
    assert gpu.run(steps[:1], is_dry=False) == 0


def test_a_dry_run_is_one_table_that_says_once_what_is_missing(gpu, capsys):
    needs = {"packages": ("no_such_package",), "tools": ("no-such-tool",)}
    steps = [_step(gpu, "first", "pass", **needs), _step(gpu, "second", "pass", **needs)]
    assert gpu.run([*steps, _step(gpu, "third", "pass")], is_dry=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["first", "second", "third", "estimate"]
    assert lines[4:] == [
        f"{name} is not installed; 2 of 3 steps need it (looked for by {sys.executable})"
        for name in ("no_such_package", "no-such-tool")
    ]


def test_a_failing_step_stops_no_other_and_is_told(gpu, capsys):
    steps = [_step(gpu, "bad", "raise SystemExit(7)"), _step(gpu, "good", "pass")]
    assert gpu.run(steps, is_dry=False) == 1
    told = capsys.readouterr().out
    assert "failed, exit code 7" in told
    assert "ok (" in told


def test_steps_are_taken_in_order_while_they_fit(gpu, capsys):
    steps = [
        _step(gpu, "first", "pass", seconds=60),
        _step(gpu, "too long", "raise SystemExit(7)", seconds=50),
        _step(gpu, "short", "pass", seconds=30),
    ]
    assert gpu.run(steps, is_dry=True, budget=100) == 0
    told = capsys.readouterr().out
    assert re.search(r"^first +would run, about 60 s, 100 s at most$", told, re.MULTILINE)
    assert re.search(r"^too long +left out: takes about 50 s, 40 s are left$", told, re.MULTILINE)
    assert re.search(r"^short +would run, about 30 s, 40 s at most$", told, re.MULTILINE)
    # In earnest what was spent counts, not the estimate.
    assert gpu.run([steps[0], steps[2]], is_dry=False, budget=100) == 0
    assert gpu.run(steps, is_dry=False, budget=40) == 1
    assert "-- first: left out: takes about 60 s, 40 s are left" in capsys.readouterr().out
    # All of the budget is enough, though a moment of it has passed by then.
    assert gpu.run([steps[2]], is_dry=False, budget=30) == 0


@pytest.mark.parametrize("budget", ["nan", "inf", "-5", "0", "x"])
def test_a_budget_is_a_number_of_seconds(gpu, budget, capsys):
    with pytest.raises(SystemExit) as caught:
        gpu.main(["bench", "--budget", budget, "--dry-run"])
    assert caught.value.code == 2
    assert budget in capsys.readouterr().err


def test_the_first_engine_of_a_bare_machine_compiles(gpu, capsys):
    steps = [
        _step(gpu, "kernel", "pass", seconds=10),
        _step(gpu, "engine", "pass", seconds=10, has_engine=True),
        _step(gpu, "another", "pass", seconds=10, has_engine=True),
    ]
    gpu.run(steps, is_dry=True, is_cold=True)
    told = capsys.readouterr().out
    assert re.search("kernel +would run, about 10 s", told)
    assert re.search(f"engine +would run, about {10 + gpu.COMPILE_SECONDS} s", told)
    assert re.search("another +would run, about 10 s", told)
    assert told.splitlines()[-1].split()[1:] == [str(30 + gpu.COMPILE_SECONDS), "s"]


CHILD = "import time; time.sleep(60)"
STUBBORN = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_step_is_cut_at_its_limit_with_all_that_it_started(gpu, capfd, monkeypatch):
    monkeypatch.setattr(gpu, "END_SECONDS", 0.2)
    step = _step(gpu, "endless", STUBBORN)
    begin = time.perf_counter()
    # The limit is what the step needs, on a busy machine too, to begin its child and say so.
    assert gpu.run([step], is_dry=False, budget=3) == 1
    assert time.perf_counter() - begin < 30
    told = capfd.readouterr().out
    assert re.search(r"cut off after \d+ s; what it had measured is recorded", told)
    [child] = [int(line) for line in told.splitlines() if line.isdigit()]
    status = Path(f"/proc/{child}/status")
    deadline = time.monotonic() + 10
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < deadline, "a child outlived its step"
        time.sleep(0.01)


ENDED = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("rose_tools_gpu", {str(TOOL)!r})
gpu = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = gpu
spec.loader.exec_module(gpu)
program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
step = gpu.Step(name="long", words=("-c", program), seconds=60, packages=(), tools=())
gpu.bench_steps = lambda asked: [step]
sys.exit(gpu.main(["bench"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_whatever_ends_it_ends_the_step_and_leaves_nothing(number, tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", ENDED]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as tool:
        # A tool that never says its step, or never ends, is ended here; its step, which holds the pipe, ends by itself.
        limit = threading.Timer(LIMIT_SECONDS, tool.kill)
        limit.start()
        try:
            step = next(int(line) for line in tool.stdout if line.strip().isdigit())
            assert list(tmp_path.iterdir())
            tool.send_signal(number)
            # Ends only where nobody holds the pipe any more, the step included.
            tool.stdout.read()
            assert tool.wait(10) == 128 + number
        finally:
            limit.cancel()
    assert not list(tmp_path.iterdir())
    assert not Path(f"/proc/{step}").exists()


def test_a_step_that_ends_by_itself_is_taken_where_its_first_part_fits(gpu, capfd):
    step = _step(gpu, "sweep", f"print('until', {gpu.UNTIL!r})", seconds=400, least=80)
    assert gpu.run([step], is_dry=False, budget=100) == 0
    assert "until 80" in capfd.readouterr().out
    assert gpu.run([step], is_dry=False, budget=79) == 1
    assert "left out: takes about 400 s, 79 s are left" in capfd.readouterr().out
    # A plan on a bare machine counts what compiling takes on top.
    step = _step(gpu, "sweep", "pass", seconds=400, least=80, has_engine=True)
    gpu.run([step], is_dry=True, budget=80 + gpu.COMPILE_SECONDS - 1, is_cold=True)
    assert "left out" in capfd.readouterr().out
    gpu.run([step], is_dry=True, budget=80 + gpu.COMPILE_SECONDS, is_cold=True)
    told = capfd.readouterr().out
    assert f"would run, about {80 + gpu.COMPILE_SECONDS} s" in told


def test_without_a_budget_such_a_step_is_taken_whole(gpu, capsys):
    for is_dry in (True, False):
        step = _step(gpu, "sweep", "pass", seconds=400, least=80)
        assert gpu.run([step], is_dry=is_dry) == 0
    assert "would run, about 400 s, 830 s at most" in capsys.readouterr().out
    for verb in ("check", "bench"):
        assert gpu.main([verb, "--dry-run"]) == 0


def test_a_step_learns_when_to_begin_nothing_more(gpu, capfd):
    step = _step(gpu, "sweep", f"print('until', {gpu.UNTIL!r})", seconds=30)
    assert gpu.run([step], is_dry=False) == 0
    assert "until 70" in capfd.readouterr().out  # 2 x 30 + 30, and 20 to end in
    assert gpu.run([step], is_dry=False, budget=60) == 0
    assert "until 40" in capfd.readouterr().out


def test_a_patched_step_runs_in_a_copy(gpu, capfd, tmp_path):
    patch = tmp_path / "a.patch"
    patch.write_text("--- /dev/null\n+++ b/src/patched.py\n@@ -0,0 +1 @@\n+WORD = 'patched'\n")
    program = "import os, patched; print(patched.WORD, os.path.isdir('benchmarks'))"
    assert gpu.run([_step(gpu, "draw", program, patch=patch)], is_dry=False) == 0
    assert "patched True" in capfd.readouterr().out
    assert not (ROOT / "src" / "patched.py").exists()


def test_the_patch_of_the_draw_applies(gpu, tmp_path):
    [step] = [s for s in gpu.bench_steps(_asked(gpu)) if s.patch is not None]
    gpu.copy_patched(step.patch, tmp_path)
    changed = "src/rose/kernels/sample/draw_cluster.cuh"
    assert (tmp_path / changed).read_text() != (ROOT / changed).read_text()


def test_unknown_words_are_answered_with_the_steps_there_are(gpu, capsys):
    # Words of nothing beside others would be left out without a word; nothing behind a comma would mean all.
    for only, word in (
        ("nothing", "nothing"),
        ("20b sweep,nothing", "nothing"),
        ("20b sweep,", ""),
    ):
        with pytest.raises(SystemExit):
            gpu.main(["bench", "--only", only, "--dry-run"])
        told = capsys.readouterr().err
        assert f"no step has {word!r} in its name; there are 20b table, " in told
    assert gpu.main(["bench", "--only", "20b start, memory plan", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert told.count("20b start") == 2
    assert told.count("120b memory plan") == 1
    assert "120b start" not in told
    assert "sweep" not in told
    with pytest.raises(SystemExit):
        gpu.main(["bench", "--sizes", "7b"])
    assert "takes 20b, 120b, tiny" in capsys.readouterr().err


def test_every_step_that_the_pages_name_exists(gpu):
    steps = {
        "check": list(gpu.check_steps(_asked(gpu))),
        "bench": list(gpu.bench_steps(_asked(gpu))),
    }
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = [
        found
        for page in pages
        for found in re.findall(r'make gpu-(check|bench) ONLY="([^"]+)"', page.read_text())
    ]
    performance = (ROOT / "docs" / "performance.md").read_text()
    _, table = performance.split("\n## Not measured\n")
    rows = [row for row in table.split("\n## ")[0].splitlines() if row.startswith("| ")][1:]
    for row in rows:
        words = re.findall(r'`"([^"]+)"`( \(check\))?', row.split("|")[-2])
        assert words, row
        named += [("check" if is_check else "bench", only) for only, is_check in words]
    assert len(named) > len(rows)
    for verb, only in named:
        assert gpu.chosen(steps[verb], only), only  # raises for words that are in no name


def test_make_hands_its_variables_over():
    words = ["make", "-n", "gpu-bench", "BUDGET=540", "ONLY=20b sweep", "OUT=/results", "DRY=1"]
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    limited = {"cwd": ROOT, "text": True, "env": environment, "timeout": LIMIT_SECONDS}
    shown = subprocess.check_output(words, **limited)
    given = shlex.split(shown.replace("\\\n", " "))
    assert given[0] == (".venv/bin/python" if (ROOT / ".venv/bin/python").exists() else "python3")
    named = subprocess.check_output([*words, "PYTHON=other"], **limited)
    assert named.split()[0] == "other"
    for pair in (["--budget", "540"], ["--only", "20b sweep"], ["--out", "/results"]):
        assert given[given.index(pair[0]) + 1] == pair[1]
    assert given[-1] == "--dry-run"
