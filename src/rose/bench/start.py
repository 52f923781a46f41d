"""Time from the start of a process to its first token, with compiled kernels at hand or with none.

Every sample is a process of its own. For a fresh start its home and its caches are empty folders, so that
Triton, our own CUDA build and the driver compile everything anew; the caller's caches are not touched.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.bench.first_token import EXIT_REFUSED
from rose.bench.progress import BenchProgress
from rose.bench.record import Origin, append
from rose.utils.errors import ConfigError, RoseError
from rose.utils.process import clearing_up, end_with_parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One process that reached its first token."""

    seconds: float
    facts: dict[str, Any]
    """What the child said: config, device, stages."""


def fresh_environment(base: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return an environment in which every cache of compiled kernels lies in `folder`.

    HOME holds those of rose and of NVIDIA's driver; packages installed for the user stay visible.
    """
    return {
        **base,
        "HOME": str(folder),
        "PYTHONUSERBASE": base.get("PYTHONUSERBASE", site.getuserbase()),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TRITON_HOME": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "CUDA_CACHE_PATH": str(folder / "nv"),
    }


def start_once(
    choices: Mapping[str, Any],
    *,
    environment: Mapping[str, str],
    report: Callable[[str], None] = lambda _text: None,
) -> Start:
    """Start a child, wait for its first token.

    Raises  ConfigError with what the child refuses, RoseError with its last words where it ends otherwise
    """
    command = [sys.executable, "-m", "rose.bench.first_token", json.dumps(dict(choices))]
    with tempfile.TemporaryFile("w+") as errors:
        begin = time.perf_counter()
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=dict(environment),
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        ) as child:
            assert child.stdout is not None
            try:
                # Compilers may print, too.
                line = next((text for text in child.stdout if text.startswith("{")), "")
                seconds = time.perf_counter() - begin
            except BaseException:
                child.kill()
                raise
        errors.seek(0)
        words = errors.read().splitlines()
    if not line:
        if child.returncode == EXIT_REFUSED and words:
            raise ConfigError(json.loads(words[-1]).splitlines())
        last = "\n".join(words[-5:])
        raise RoseError(f"the process ended with code {child.returncode} and no token:\n{last}")
    facts = json.loads(line)
    report(", ".join(f"{stage} after {s:.1f} s" for stage, s in facts["stages"].items()))
    return Start(seconds=seconds, facts=facts)


def run_start(
    *, is_cached: bool, repeats: int, path: Path | None, commit: str | None, **choices: Any
) -> None:
    """Measure starts and record one line; ended from outside, it leaves no process and no folder."""
    starts: list[Start] = []
    with clearing_up(), BenchProgress().running() as progress:
        progress.expect(repeats + is_cached)
        # Where caches count, a first process fills them.
        for i in range(0 if is_cached else 1, repeats + 1):
            progress.now(f"start {i} of {repeats}" if i else "filling the caches")
            folder: Any = nullcontext() if is_cached else tempfile.TemporaryDirectory()
            with folder as empty:
                base = dict(os.environ)
                environment = base if empty is None else fresh_environment(base, Path(empty))
                started = start_once(choices, environment=environment, report=progress.say)
            progress.done(f"first token after {started.seconds:.2f} s")
            if i:
                starts.append(started)
        facts = starts[-1].facts
        origin = Origin.here(device=facts["device"], config=facts["config"], commit=commit)
        line = origin.line(
            "start",
            [s.seconds for s in starts],
            model=choices["size"],
            cached=is_cached,
            kv=facts["kv"],
            stages=facts["stages"],
        )
        if facts["is_option"]:
            line["option"] = True
        append(path, line)
        kind = "caches warm" if is_cached else "nothing cached"
        progress.say(
            f"gpt-oss-{choices['size']}, {kind}: {line['median']:.2f} s to the first token "
            f"(p10 {line['p10']:.2f}, p90 {line['p90']:.2f})"
        )
