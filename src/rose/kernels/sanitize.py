"""Small cases under NVIDIA's compute-sanitizer: accesses outside an allocation, or races in shared memory.

One process after the other, or many side by side, each with one implementation and one case and a limit of its own, so
that a slow one costs itself alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rose.kernels import aot, registry
from rose.kernels.build import CudaLibrary
from rose.kernels.check import cases_module, is_runnable, require_names
from rose.utils.device import DeviceFacts
from rose.utils.errors import RoseError

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
USUAL = Path("/usr/local/cuda/bin/compute-sanitizer")
OURS = "4rose"
"""In the mangled name of each CUDA kernel of `NAMED` and of no kernel of torch, cuBLAS or Triton. Those draw inputs
and make references: most of the work, of which nothing is asked here."""
NAMED = frozenset({"decode_layers", "moe_experts"})
"""Operations all of whose CUDA kernels lie in `namespace rose`; others would be clean because nothing was looked at."""
BLOCKS = 2
"""Of a persistent kernel under racecheck; blocks.cuh says why."""
STAGES = {"moe_experts": ("rose.kernels.moe_experts.e4m3_stages", 3)}
"""A module that checks a kernel in parts, which take sizes that the operation does not, and how many shapes it has."""
REPORTED = 3
"""Exit code where the tool reports anything."""


def find_sanitizer() -> str:
    """Return the tool on PATH, or the one in CUDA's usual place.

    Raises  RoseError where there is none.
    """
    found = shutil.which("compute-sanitizer") or (str(USUAL) if USUAL.exists() else None)
    if found is None:
        raise RoseError(
            f"sanitize needs compute-sanitizer; found none on PATH and no {USUAL}; it comes with the CUDA toolkit "
            "(package cuda-sanitizer); install it, or run `check`, which compares results only"
        )
    return found


def defines(tool: str) -> tuple[str, ...]:
    """Return what the CUDA libraries are built with for a tool; cuda_common/mbarrier.cuh says why."""
    return ("ROSE_RACECHECK",) if tool == "racecheck" else ()


def sanitizer_command(
    checked: Sequence[str], *, toolchain: str, tool: str = "memcheck"
) -> tuple[list[str], dict[str, str]]:
    """Return the command that checks small cases under one of `TOOLS`, and what its environment adds.

    `checked`: more arguments of `check`. The command fails where a result is wrong or the tool reports anything.
    """
    check = ["-m", "rose.kernels", "check", "--device", "cuda", "--small", "--toolchain", toolchain]
    command = [find_sanitizer(), "--tool", tool, "--error-exitcode", str(REPORTED), sys.executable]
    # Torch's allocator hands out parts of large blocks: what leaves a tensor would stay inside one.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for word in defines(tool):
        check += ["--define", word]
    return [*command, *check, *checked], environment


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One process: a program of ours, and what of it is looked at."""

    implementation: str
    case: str
    words: tuple[str, ...]
    """Arguments of Python."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a trial under a tool."""

    tool: str
    implementation: str
    case: str
    verdict: str
    """clean, reported, failed (a wrong result, or the program itself), or cut off."""
    seconds: float
    told: str
    """The tool's own summary, or the last line of the program; reports, at most a thousand letters of them."""


def trials_of(
    operations: Sequence[str],
    device: DeviceFacts,
    *,
    only: str | None = None,
    case_name: str | None = None,
    seed: int = 0,
) -> list[Trial]:
    """Return a trial for each CUDA implementation and each case of `branches` that it takes, after building all.

    `case_name`: that case instead.

    Raises  RoseError where there are trials of an operation whose kernels the tool would pass over
    """
    require_names(operations, implementation=only, case=case_name)
    trials, builds = [], []
    for name in operations:
        registry.load(name)
        chosen = [c for c in cases_module(name).CASES if case_name in (c.name, None)]
        chosen = [c for c in chosen if c.branches or case_name]
        for i in registry.implementations(name):
            if i.toolchain != "cuda" or only not in (None, i.name):
                continue
            for case in chosen:
                if is_runnable(i, case, device) is not None:
                    continue
                if name not in NAMED:
                    raise RoseError(
                        f"{name} was to be looked at side by side, where the tool would pass over its kernels; "
                        f"allowed: {', '.join(sorted(NAMED))}; leave out --jobs"
                    )
                words = ("-m", "rose.kernels", "check", name, "--only", i.name, "--case", case.name)
                words += ("--seed", str(seed))
                trials.append(Trial(implementation=i.name, case=case.name, words=words))
        if only is None and case_name is None:
            module, num_shapes = STAGES.get(name, ("", 0))
            trials += [
                Trial(
                    implementation=module.rpartition(".")[2],
                    case=f"shape {number}",
                    words=("-m", module, "--shape", str(number), "--seed", str(seed)),
                )
                for number in range(num_shapes)
            ]
        builds += aot.cuda_libraries(name)
    with ThreadPoolExecutor() as pool:
        list(pool.map(CudaLibrary.build, builds))
    return trials


def trial_command(trial: Trial, tool: str) -> list[str]:
    """Return the command of a trial: the tool looks at `OURS` alone, and at tensor copies where its version can."""
    command = [find_sanitizer(), "--tool", tool, "--error-exitcode", str(REPORTED)]
    command += ["--kernel-name", f"kns={OURS}", "--print-limit", "20"]
    # Ports to choose from, where many run beside each other.
    command += ["--max-connections", "100"]
    if tool == "memcheck":
        # Newer versions ask torch's calls more; kernels are what is asked about.
        command += ["--report-api-errors", "explicit"]
        if "--check-tensor-ops" in _options():
            command += ["--check-tensor-ops", "yes"]
    words = [*trial.words, "--device", "cuda"]
    for word in side_by_side_defines(tool):
        words += ["--define", word]
    return [*command, sys.executable, *words]


def side_by_side_defines(tool: str) -> tuple[str, ...]:
    """Return what libraries are built with for trials: few blocks, too, where a tool follows races."""
    return (*defines(tool), f"ROSE_BLOCKS={BLOCKS}") if tool == "racecheck" else defines(tool)


@cache
def _options() -> str:
    done = subprocess.run([find_sanitizer(), "--help"], capture_output=True, text=True, check=False)
    return done.stdout


def run_trials(trials: Sequence[Trial], *, tool: str, jobs: int, limit: float) -> Iterator[Verdict]:
    """Run trials, `jobs` at a time and each for `limit` seconds at most; verdicts as they come.

    Whatever ends it, the processes that it started are ended with it.
    """
    running: set[int] = set()
    with ThreadPoolExecutor(jobs) as pool:
        begun = [
            pool.submit(run_trial, trial, tool=tool, limit=limit, running=running)
            for trial in trials
        ]
        try:
            for done in as_completed(begun):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for group in tuple(running):
                _kill(group)
            raise


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run_trial(trial: Trial, *, tool: str, limit: float, running: set[int]) -> Verdict:
    """Run one trial to its end or its limit; its process group is in `running` meanwhile."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begin = time.perf_counter()
    code: int | None
    with tempfile.TemporaryFile("w+") as log:
        # A session of its own: the tool and what it looks at are ended as one.
        with subprocess.Popen(
            trial_command(trial, tool), env=environment, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:  # fmt: skip
            running.add(process.pid)
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _kill(process.pid)
                running.discard(process.pid)
        log.seek(0)
        verdict, told = judged(code, log.read())
    return Verdict(
        tool=tool,
        implementation=trial.implementation,
        case=trial.case,
        verdict=verdict,
        seconds=round(time.perf_counter() - begin, 1),
        told=told,
    )


def judged(code: int | None, text: str) -> tuple[str, str]:
    """Return a verdict and what was told, of an exit code (None: cut off) and all that was printed.

    Clean is what the tool's own summary says, and only where the program found a result and it was right: no summary is
    no pass, nor is a case that was skipped.
    """
    summaries = re.findall(r"^=+ ((?:RACECHECK|ERROR) SUMMARY: .*)$", text, re.MULTILINE)
    reports = re.findall(r"^=+ +(\S.*)$", text, re.MULTILINE)
    reports = [line for line in reports if line not in ("COMPUTE-SANITIZER", *summaries)]
    lines = text.strip().splitlines() or ["printed nothing"]
    if code is None:
        return "cut off", "\n".join(reports or lines[-1:])[:1000]
    is_right = code == 0 and re.search(r"^ok\b", text, re.MULTILINE)
    if is_right and summaries and re.search(r"SUMMARY: 0 (?:hazards|errors)", summaries[-1]):
        return "clean", summaries[-1]
    if code == REPORTED:
        return "reported", "\n".join([*summaries, *reports])[:1000]
    return "failed", "\n".join(lines[-5:])[-1000:]
