"""`make gpu-check` and `make gpu-bench`: one command on a machine with torch, triton, nvcc and a GPU, and no network.

usage: gpu.py check|bench [--commit HASH] [--out DIR] [--sizes 20b,120b] [--only WORDS] [--dry-run]
Standard library only; each step is a process of its own, so that one that fails stops no other. What cannot
run here is left out, with the reason, and makes the exit code 1: an incomplete run is no pass.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNEL_PACKAGES = ("torch", "triton")
ENGINE_PACKAGES = ("msgspec", "numpy", "click", "rich")
USUAL_CUDA = Path("/usr/local/cuda/bin")


@dataclass(frozen=True)
class Step:
    """One process and what it needs beside the packages of the kernels."""

    name: str
    words: tuple[str, ...]
    """Arguments of Python."""
    packages: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()


def check_steps(sizes: list[str], commit: str | None, out: Path) -> Iterator[Step]:
    """Return what `gpu-check` runs: kernels, sanitizers, the model against its reference, GPU tests."""
    kernels = ("-m", "rose.kernels")
    yield Step("kernels x cases", (*kernels, "check", "--device", "cuda"), tools=("nvcc",))
    for tool in ("memcheck", "racecheck"):
        words = (*kernels, "sanitize", "--tool", tool)
        yield Step(tool, words, tools=("nvcc", "compute-sanitizer"))
    path = out / f"{date.today():%Y%m%d}-accuracy.jsonl"
    for size in sizes:
        for weights in ("mxfp4", "fp8_block"):
            words = (
                "-m",
                "rose.cli.main",
                "bench",
                "accuracy",
                "--device",
                "cuda",
                "--layers",
                "2",
            )
            words += ("--size", size, "--weights", weights, "--most", "1.2", *_record(path, commit))
            yield Step(f"{size} {weights} against the reference", words, ENGINE_PACKAGES)
    tests = ("-m", "pytest", "-q", "-m", "gpu", "tests", "--ignore", "tests/kernels")
    yield Step("GPU tests", tests, (*ENGINE_PACKAGES, "pytest", "pytest_timeout", "hypothesis"))


def bench_steps(sizes: list[str], commit: str | None, out: Path) -> Iterator[Step]:
    """Return what `gpu-bench` runs: the cells of the score table first, then sweeps, load and kernels."""
    day = f"{date.today():%Y%m%d}"
    for size in sizes:
        common = ("--size", size, "--device", "cuda", *_record(out / f"{day}-{size}.jsonl", commit))
        largest = "96" if size == "120b" else "128"

        def step(
            name: str, *words: str, size: str = size, common: tuple[str, ...] = common
        ) -> Step:
            command = ("-m", "rose.cli.main", "bench", *words, *common)
            return Step(f"{size} {name}", command, ENGINE_PACKAGES, ("nvcc",))

        yield step("latency", "latency", "--batches", f"1,8,32,{largest}")
        yield step("start, cached", "start", "--cached")
        yield step("start, fresh", "start", "--fresh", "--repeats", "1")
        yield step("decode sweep", "decode", "--batches", "1,2,4,5,8,16,17,32,48,64,96,128",
                   "--context", "1024,8192,32768,128000")  # fmt: skip
        yield step("many prompts", "prefill", "--tokens", "8192", "--prompts", largest)
        yield step("mixed", "mixed")
        yield step("load", "load")
    words = ("-m", "rose.bench.kernels", "--device", "cuda")
    yield Step("kernels", (*words, *_record(out / f"{day}-kernels.jsonl", commit)), tools=("nvcc",))


def _record(path: Path, commit: str | None) -> tuple[str, ...]:
    return ("--json", str(path), *(("--commit", commit) if commit else ()))


def missing(step: Step) -> list[str]:
    """Return what a step needs and this machine has not."""
    packages = [p for p in (*KERNEL_PACKAGES, *step.packages) if not importlib.util.find_spec(p)]
    tools = [t for t in step.tools if not (shutil.which(t) or (USUAL_CUDA / t).exists())]
    return [f"{name} is not installed" for name in (*packages, *tools)]


def run(steps: list[Step], *, is_dry: bool) -> int:
    """Run all steps, print what became of each, return 0 where all ran and passed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    outcomes = {}
    for step in steps:
        _say(f"== {step.name}: {shlex.join(['python', *step.words])}")
        lacks = missing(step)
        if lacks:
            outcomes[step.name] = "left out: " + "; ".join(lacks)
        elif is_dry:
            outcomes[step.name] = "would run"
        else:
            begin = time.perf_counter()
            code = subprocess.call([sys.executable, *step.words], cwd=ROOT, env=environment)
            word = "ok" if code == 0 else f"failed, exit code {code}"
            outcomes[step.name] = f"{word} ({time.perf_counter() - begin:.0f} s)"
    _say("")
    for name, outcome in outcomes.items():
        _say(f"{name:40} {outcome}")
    return 0 if all(outcome.startswith("ok") for outcome in outcomes.values()) else 1


def main(arguments: list[str]) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="gpu.py", description=__doc__)
    parser.add_argument("verb", choices=["check", "bench"])
    parser.add_argument("--commit", help="commit of the tree, where it has no .git")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--sizes", default="20b,120b")
    parser.add_argument("--only", default="", metavar="WORDS", help="steps with this in their name")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the steps and what is missing"
    )
    options = parser.parse_args(arguments)
    steps = {"check": check_steps, "bench": bench_steps}[options.verb]
    every = list(steps(options.sizes.split(","), options.commit, options.out))
    chosen = [s for s in every if options.only in s.name]
    if not chosen:
        parser.error(
            f"no step has {options.only!r} in its name; there are {', '.join(s.name for s in every)}"
        )
    return run(chosen, is_dry=options.dry_run)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
