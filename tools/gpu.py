"""`make gpu-check` and `make gpu-bench`: one command on a machine with torch, triton, nvcc and a GPU, and no network.

usage: gpu.py check|bench [--commit HASH] [--out DIR] [--sizes 20b,120b] [--only WORDS[,WORDS]] [--budget SECONDS]
              [--dry-run]
Standard library only; each step is a process of its own, so that one that fails stops no other. What cannot run here,
what does not fit into the budget and what was cut off is said, with the reason, and makes the exit code 1: an
incomplete run is no pass. Results are appended line by line, so that a run that is cut loses what it had begun only.
A dry run is a plan: one table, what is missing here, exit code 0.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE_PACKAGES = ("msgspec", "numpy", "click", "rich")
USUAL_CUDA = Path("/usr/local/cuda/bin")
CACHES = (Path.home() / ".cache/rose/kernels", Path.home() / ".triton/cache")
COMPILE_SECONDS = 25
"""What the first engine on a bare machine takes longer than the next: 18 and 31 s to its first token, then 10 to 13."""
SETUP_SECONDS = {"20b": 20, "120b": 30, "tiny": 10}
"""Imports, weights, warm-up and graphs of an engine whose kernels are compiled, with room to spare."""
START_SECONDS = {"20b": 12, "120b": 15, "tiny": 10}
"""A process from its start to its first token, kernels compiled: 9.9 s and 13.1 s."""
UNTIL = "{until}"
"""In a step's words: seconds after which it should begin nothing more."""
LEAST_ROOM = 20
"""Seconds between that and its limit: the longest cell of a sweep."""
LEAST_CELLS = 60
"""Seconds of cells that are worth setting an engine up for."""
END_SECONDS = 5
"""From the request to end to the kill."""
ROUNDING_SECONDS = 0.5
"""Budgets are told in whole seconds: a step that takes all of one is not left out for what it took to get there."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One process and what it needs."""

    name: str
    words: tuple[str, ...]
    """Arguments of Python."""
    seconds: int
    """Estimate, with kernels compiled; a guess from neighbours where it was never timed."""
    least: int | None = None
    """Seconds that are worth beginning with, where it ends by itself at `UNTIL` and what matters most comes first."""
    packages: tuple[str, ...] = ("torch", "triton")
    tools: tuple[str, ...] = ("nvcc",)
    has_engine: bool = False
    """Whether it compiles all kernels of an engine where none are cached."""
    patch: Path | None = None
    """Runs in a copy of the tree with this applied."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The cells of one size."""

    table: tuple[tuple[str, ...], ...]
    """Those of the score table, many prompts, mixed load and growth, as parts of `rose bench sweep`."""
    more: tuple[tuple[str, ...], ...]
    """Other contexts and batches and the load, those first that a run cut short should have."""
    narrow: tuple[tuple[str, ...], ...]
    """Those that KV in FP8 is measured by."""
    seconds: tuple[int, int]
    """For `table` and for `more`, setting up left out."""
    step_tokens: int
    """A larger step to be compared with the usual one."""
    prompt: str
    """A prompt that fills it."""


def _parts(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(part.split()) for part in text.split(" + "))


# Seconds by the figures of docs/performance.md: 20b table 60, many prompts 30, mixed and growth 20. Its other cells
# took 132 from the end of the first to that of the last, 90 of them the load's; those of the 120b are a guess.
LOAD = (
    " + load --fill --seconds 5 --input-tokens 1024 --in-flight 32,128,64,256,8,1,16,4,2"
    " + load --fill --seconds 5 --input-tokens 8192 --in-flight 32,128,64,256,8,1,16,4,2"
)
SHAPES = {
    "20b": Shape(
        table=_parts(
            "prefill --tokens 8192,32768,65536,128000 + decode --context 8192 --batches 1,8,32,128"
            " + prefill --tokens 8192 --prompts 128 --repeats 2 + mixed + growth"
        ),
        more=_parts(
            "decode --fill --repeats 8 --context 32768 --batches 48"
            " + decode --fill --repeats 8 --context 128000 --batches 17"
            " + decode --fill --repeats 2 --context 32768 --batches 1,2,5,8,17,32"
            " + decode --fill --repeats 2 --context 128000 --batches 1,2,5,8"
            " + decode --fill --repeats 2 --context 1024 --batches 1,2,5,8,17,32,48,128" + LOAD
        ),
        narrow=_parts(
            "prefill --tokens 8192,32768 --repeats 2 + growth"
            " + decode --fill --repeats 3 --context 8192,32768,128000 --batches 1,8,32,48,128"
            " + load --fill --seconds 5 --input-tokens 8192 --in-flight 32,128,256"
        ),
        seconds=(110, 160),
        step_tokens=32768,
        prompt="32768",
    ),
    "120b": Shape(
        table=_parts(
            "prefill --tokens 8192,32768,65536,128000 + decode --context 8192 --batches 1,8,32,96"
            " + prefill --tokens 8192 --prompts 96 --repeats 2 + mixed + growth"
        ),
        more=_parts(
            "decode --fill --repeats 2 --context 32768,128000,1024 --batches 1,2,5,17,48" + LOAD
        ),
        narrow=_parts(
            "prefill --tokens 8192,32768 --repeats 2 + growth"
            " + decode --fill --repeats 3 --context 8192,32768,128000 --batches 1,8,32,48,96"
            " + load --fill --seconds 5 --input-tokens 8192 --in-flight 32,128,256"
        ),
        seconds=(150, 300),
        step_tokens=32768,
        prompt="32768",
    ),
    "tiny": Shape(
        table=_parts(
            "prefill --tokens 64 --repeats 1 + decode --context 64 --batches 1,2"
            " + prefill --tokens 64 --prompts 3 --repeats 1"
            " + mixed --batch 2 --context 32 --prompt-tokens 600 --repeats 1"
            " + growth --steps 50 --batch 2 --prompt-tokens 32 --output-tokens 8"
        ),
        more=_parts(
            "decode --fill --repeats 1 --context 64,128 --batches 1,2"
            " + load --fill --seconds 1 --input-tokens 32 --output-tokens 16 --in-flight 1,2"
        ),
        narrow=_parts("decode --fill --repeats 1 --context 64 --batches 1,2"),
        seconds=(40, 20),
        step_tokens=2048,
        prompt="1100",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line says of every step."""

    sizes: tuple[str, ...]
    out: Path
    commit: str | None = None
    device: str = "cuda"

    def record(self, name: str, *, option: str = "--json") -> tuple[str, ...]:
        """Return the options that append lines to a file of today."""
        commit = ("--commit", self.commit) if self.commit else ()
        return (*self.file(name, option=option), *commit)

    def file(self, name: str, *, option: str = "--json") -> tuple[str, ...]:
        """Return the same for a script that asks for no commit."""
        return (option, str((self.out / f"{date.today():%Y%m%d}-{name}.jsonl").absolute()))


def check_steps(asked: Asked) -> Iterator[Step]:
    """Return what `gpu-check` runs: kernels, sanitizers, the model against its reference, GPU tests."""
    kernels = ("-m", "rose.kernels")
    check = (*kernels, "check", "--device", asked.device)
    yield Step(name="kernels x cases", words=check, seconds=240)
    if asked.device == "cuda":
        words = ("benchmarks/design_points.py", "--only", "attention")
        words += asked.record("design-points", option="--out")
        yield Step(name="attention at 128000", words=words, seconds=30)
    sanitizer = ("nvcc", "compute-sanitizer")
    memcheck = (*kernels, "sanitize", "--tool", "memcheck")
    yield Step(name="memcheck", words=memcheck, seconds=240, tools=sanitizer)
    for size in asked.sizes:
        for weights, kv in (("mxfp4", "bf16"), ("fp8_block", "bf16"), ("mxfp4", "fp8_e4m3")):
            words = ("accuracy", "--device", asked.device, "--layers", "2", "--size", size)
            words += ("--weights", weights, "--most", "1.2", *asked.record("accuracy"))
            if kv != "bf16":
                words += ("--kv", kv)
            yield Step(
                name=f"{size} {weights}{'' if kv == 'bf16' else f', {kv} KV,'} against the reference",
                words=("-m", "rose.cli.main", "bench", *words),
                seconds=30 + SETUP_SECONDS[size],
                packages=("torch", "triton", *ENGINE_PACKAGES),
            )
    for tool in ("racecheck", "memcheck"):
        words = (
            *kernels,
            "sanitize",
            "--tool",
            tool,
            "moe_experts",
            "--jobs",
            "12",
            "--limit",
            "80",
        )
        yield Step(
            name=f"{tool} side by side",
            words=(*words, *asked.record("sanitize")),
            seconds=110,
            tools=sanitizer,
        )
    for names, seconds in RACECHECKED:
        words = (*kernels, "sanitize", "--tool", "racecheck", *names.split())
        yield Step(name=f"racecheck {names}", words=words, seconds=seconds, tools=sanitizer)
    tests = ("-m", "pytest", "-q", "-m", "gpu", "tests", "--ignore", "tests/kernels")
    yield Step(
        name="GPU tests",
        words=tests,
        seconds=120,
        packages=("torch", "triton", *ENGINE_PACKAGES, "pytest", "pytest_timeout", "hypothesis"),
        has_engine=True,
    )


RACECHECKED = (
    ("decode_layers --jobs 1", 120),
    ("moe_experts --only cuda_decode", 60),
    ("moe_experts --only cuda_decode_many_tokens", 60),
    ("attention_prefill", 90),
    ("moe_route", 30),
    ("sample", 60),
)
"""CUDA kernels that are not looked at side by side: all small cases, one process for each, since they take minutes. Of
decode_layers one case after the other, without the kernels that draw: its grid has the machine for itself."""


def bench_steps(asked: Asked) -> Iterator[Step]:
    """Return what `gpu-bench` runs: an engine per size for most cells, what needs one of its own, kernels."""
    for size in asked.sizes:
        yield from _sized_steps(size, asked)
    for size in asked.sizes:
        yield from _script_steps(size, asked)
    if asked.device == "cuda":
        yield from _kernel_steps(asked)


def _sized_steps(size: str, asked: Asked) -> Iterator[Step]:
    shape, setup = SHAPES[size], SETUP_SECONDS[size]
    common = ("--size", size, "--device", asked.device, *asked.record(size))
    if size == "tiny":
        common += ("--layers", "2", "--kv-tokens", "8192")  # a trial on any machine

    def step(
        name: str, *words: str, seconds: int, least: int | None = None, has_engine: bool = True
    ) -> Step:
        return Step(
            name=f"{size} {name}",
            words=("-m", "rose.cli.main", "bench", *words),
            seconds=seconds,
            least=least,
            packages=("torch", "triton", *ENGINE_PACKAGES),
            tools=("nvcc",) if asked.device == "cuda" else (),
            has_engine=has_engine,
        )

    for name, parts, seconds in zip(
        ("table", "sweep"), (shape.table, shape.more), shape.seconds, strict=True
    ):
        cells = [word for part in parts for word in part]
        yield step(
            name, "sweep", *common, "--until", UNTIL, *cells, seconds=setup + seconds,
            least=setup + LEAST_CELLS,
        )  # fmt: skip
    few = size == "tiny"
    yield step(
        "load", "load", "--fill", "--seconds", "1" if few else "8",
        "--input-tokens", "32" if few else "1024", "--output-tokens", "16" if few else "1024",
        "--in-flight", "1,2" if few else "32,128", *common, seconds=setup + 25,
    )  # fmt: skip
    cells = [word for part in shape.narrow for word in part]
    yield step(
        "FP8 KV", "sweep", "--kv", "fp8_e4m3", *common, "--until", UNTIL, *cells,
        seconds=setup + 100,
    )  # fmt: skip
    yield step(
        f"step of {shape.step_tokens}", "prefill", "--tokens", shape.prompt, "--max-step-tokens",
        str(shape.step_tokens), *common, seconds=setup + 10,
    )  # fmt: skip
    yield step(
        "start, cached", "start", "--cached", "--repeats", "2", *common,
        seconds=3 * START_SECONDS[size],
    )  # fmt: skip
    yield step(
        "start, fresh", "start", "--fresh", "--repeats", "1", *common,
        seconds=setup + COMPILE_SECONDS + 10, has_engine=False,
    )  # fmt: skip


def _script_steps(size: str, asked: Asked) -> Iterator[Step]:
    """Benchmarks that look into an engine and so need one of their own."""
    setup = SETUP_SECONDS[size]

    def step(name: str, *words: str, seconds: int, more: tuple[str, ...] = ()) -> Step:
        return Step(
            name=f"{size} {name}",
            words=(f"benchmarks/{words[0]}", "--size", size, *words[1:]),
            seconds=seconds,
            packages=("torch", "triton", *ENGINE_PACKAGES, *more),
            tools=("nvcc",) if asked.device == "cuda" else (),
            has_engine=True,
        )

    device = ("--device", asked.device)
    yield step(
        "prefill timeline", "prefill_timeline.py", *device, *asked.record("engine"),
        "--tokens", "64" if size == "tiny" else "8192", seconds=setup + 20,
    )  # fmt: skip
    if size != "120b":  # the 20b's first layers are enough: what is timed is the host
        yield step(
            "grammars", "grammar_engine.py", *device, "--layers", "2" if size == "tiny" else "4",
            *asked.record("engine"), seconds=setup + 40, more=("llguidance",),
        )  # fmt: skip
    yield step(
        "memory plan", "memory_plan.py", *device, *asked.record("engine"), seconds=setup + 15
    )


def _kernel_steps(asked: Asked) -> Iterator[Step]:
    out, json = asked.file("variants", option="--out"), asked.record("kernels")
    patch = ROOT / "benchmarks/unbound/draw.patch"
    for name, words, seconds in KERNEL_SCRIPTS:
        line = tuple(f"benchmarks/{words} --seconds {seconds}".split())
        # They compile what they compare before, or besides, the seconds that they are given.
        step = Step(name=name, words=(*line, *out), seconds=seconds + 35)
        yield step
        if name == "draw":
            tools = ("nvcc", "git")
            yield replace(step, name="draw, patched", tools=tools, patch=patch)
    splits = ("benchmarks/attention_decode_splits.py", "--seconds", "90", *json)
    packages = ("torch", "triton", *ENGINE_PACKAGES)
    yield Step(name="attention splits", words=splits, seconds=105, packages=packages, tools=())
    words = ("-m", "rose.bench.kernels", "--device", asked.device, *json)
    yield Step(name="kernels", words=words, seconds=300)


KERNEL_SCRIPTS = (
    ("draw", "decode_variants2.py --ops sample --only cluster --batches 128 32 8", 40),
    ("decode experts", "decode_variants2.py --ops 20b 120b --batches 24 48 192", 100),
    ("prefill experts, swapped", "moe_prefill_swapped.py", 59),
)
"""Name, script and its words, seconds that it is given."""


def missing(step: Step) -> list[str]:
    """Return what a step needs and this machine has not."""
    packages = [p for p in step.packages if not importlib.util.find_spec(p)]
    tools = [t for t in step.tools if not (shutil.which(t) or (USUAL_CUDA / t).exists())]
    return [f"{name} is not installed" for name in (*packages, *tools)]


def is_bare() -> bool:
    """Whether no kernel has been compiled on this machine yet."""
    return not all(cache.is_dir() and any(cache.iterdir()) for cache in CACHES)


class Run:
    """Takes steps in order while they fit, and keeps what became of each."""

    def __init__(self, *, budget: float | None, is_dry: bool, is_cold: bool) -> None:
        self.budget, self.is_dry, self.is_cold = budget, is_dry, is_cold
        self.begin, self.planned = time.perf_counter(), 0.0
        self.outcomes: dict[str, str] = {}

    def left(self) -> float:
        """Return the seconds of the budget that are left; in a dry run estimates are what was spent."""
        if self.budget is None:
            return float("inf")
        spent = self.planned if self.is_dry else time.perf_counter() - self.begin
        return self.budget - spent

    def take(self, step: Step) -> None:
        """Run a step, or say why not."""
        compiling = COMPILE_SECONDS if step.has_engine and self.is_cold else 0
        seconds, left = step.seconds + compiling, self.left()
        if step.least is not None and step.least + compiling <= left:
            seconds = math.ceil(min(seconds, left))  # in this order: infinity has no ceiling
        # As long again and half a minute: an estimate that is wrong should cost no result.
        limit = min(2 * seconds + 30, left)
        lacks = "; ".join(missing(step))
        if seconds > left + ROUNDING_SECONDS:
            outcome = f"left out: takes about {seconds} s, {max(left, 0):.0f} s are left"
        elif self.is_dry:
            outcome = f"would run, about {seconds} s, {limit:.0f} s at most"
        elif lacks:
            outcome = f"left out: {lacks}"
        else:
            outcome = self._run(step, limit)
        is_taken = not outcome.startswith("left out")
        self.planned += seconds * is_taken
        self.is_cold &= not (is_taken and step.has_engine)
        self.outcomes[step.name] = outcome
        if not self.is_dry:
            _say(f"-- {step.name}: {outcome}")

    def _run(self, step: Step, limit: float) -> str:
        words = [word.replace(UNTIL, f"{max(limit - LEAST_ROOM, 1):.0f}") for word in step.words]
        _say(f"== {step.name}: {shlex.join(['python', *words])}")
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            tree = ROOT
            if step.patch is not None:
                tree = Path(folder)
                copy_patched(step.patch, tree)
            code = call([sys.executable, *words], tree, limit)
        seconds = time.perf_counter() - begin
        if code is None:
            return f"cut off after {seconds:.0f} s; what it had measured is recorded"
        return f"{'ok' if code == 0 else f'failed, exit code {code}'} ({seconds:.0f} s)"


def call(command: list[str], tree: Path, limit: float) -> int | None:
    """Run a command in a tree; return its exit code, None where it was ended at its limit with all it had started."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    with subprocess.Popen(command, cwd=tree, env=environment, start_new_session=True) as process:
        try:
            return process.wait(limit if limit < float("inf") else None)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                _say(f"still there after {END_SECONDS} s; killed")
            return None
        finally:
            # Nothing that it started outlives it, whatever ended it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def copy_patched(patch: Path, tree: Path) -> None:
    """Copy what benchmarks need into an empty folder and apply a patch there."""
    for name in ("src", "benchmarks"):
        shutil.copytree(
            ROOT / name, tree / name, ignore=shutil.ignore_patterns("results", "__pycache__")
        )
    subprocess.run(["git", "apply", str(patch)], cwd=tree, check=True)


def run(
    steps: list[Step], *, is_dry: bool, budget: float | None = None, is_cold: bool = False
) -> int:
    """Take all steps, print what became of each, return 0 where all ran and passed, and for a dry run."""
    taken = Run(budget=budget, is_dry=is_dry, is_cold=is_cold)
    for step in steps:
        taken.take(step)
    if not is_dry:
        _say("")
    for name, outcome in taken.outcomes.items():
        _say(f"{name:40} {outcome}")
    if is_dry:
        _say(f"{'estimate':40} {taken.planned:.0f} s")
        lacking = Counter(text for step in steps for text in missing(step))
        for text, count in lacking.items():
            _say(f"{text}; {count} of {len(steps)} steps need it (looked for by {sys.executable})")
        return 0
    return 0 if all(outcome.startswith("ok") for outcome in taken.outcomes.values()) else 1


def chosen(every: list[Step], only: str) -> list[Step]:
    """Return the steps with any of these words, parted by commas, in their name; 120b is no 20b.

    Raises  ValueError for words that are in no name, and where a comma parts nothing: that would mean all
    """
    if not only:
        return every
    words = [word.strip() for word in only.split(",")]
    named = {w: [s for s in every if w and f" {w}" in f" {s.name}"] for w in words}
    for word, steps in named.items():
        if not steps:
            raise ValueError(
                f"no step has {word!r} in its name; there are {', '.join(s.name for s in every)}"
            )
    return [step for step in every if any(step in steps for steps in named.values())]


def main(arguments: list[str]) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="gpu.py", description=__doc__)
    parser.add_argument("verb", choices=["check", "bench"])
    parser.add_argument("--commit", help="commit of the tree, where it has no .git")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--sizes", default="20b,120b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="cpu: for a trial"
    )
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="steps with this in their name; commas part"
    )
    parser.add_argument(
        "--budget",
        type=_seconds,
        metavar="SECONDS",
        help="take steps in order while they fit into it",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the steps as for a bare machine"
    )
    options = parser.parse_args(arguments)
    sizes = tuple(options.sizes.split(","))
    if not set(sizes) <= set(SHAPES):
        parser.error(f"--sizes {options.sizes}; takes {', '.join(SHAPES)}, parted by commas")
    asked = Asked(sizes=sizes, out=options.out, commit=options.commit, device=options.device)
    every = list({"check": check_steps, "bench": bench_steps}[options.verb](asked))
    try:
        steps = chosen(every, options.only)
    except ValueError as error:
        parser.error(str(error))
    # Ended from outside, or by a connection that is lost, what runs is ended too; nohup means that it should not be.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda found, _frame: sys.exit(128 + found))
    is_cold = options.dry_run or is_bare()
    return run(steps, is_dry=options.dry_run, budget=options.budget, is_cold=is_cold)


def _seconds(text: str) -> float:
    """Read a number of seconds above 0; nan and infinity, which every step would fit into, are none."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return number


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
