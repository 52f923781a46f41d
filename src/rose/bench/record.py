"""One JSON line per measured cell, with what is needed to repeat it. Fields as the score table reads them."""

from __future__ import annotations

import json
import math
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rose.utils.errors import RoseError

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where figures come from: the same for every line of one run."""

    device: str
    commit: str
    command: str
    config: str
    clocks: str

    @classmethod
    def here(
        cls, *, device: str, config: str, commit: str | None = None, command: str | None = None
    ) -> Origin:
        """Describe this process; `commit` is given where the tree travels without its repository."""
        return cls(
            device=device,
            commit=commit or git_commit(),
            command=command or shlex.join(["python", "-m", "rose.cli.main", *sys.argv[1:]]),
            config=config,
            clocks=_clocks(),
        )

    def stamp(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return `fields` with the origin behind them."""
        return {
            **fields,
            "config": self.config,
            "device": self.device,
            "commit": self.commit,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": self.command,
            "clocks": self.clocks,
        }

    def line(self, bench: str, samples: Sequence[float], **fields: Any) -> dict[str, Any]:
        """Return a line with median, 10th and 90th percentile of `samples`."""
        return self.stamp(
            {
                "bench": bench,
                **fields,
                "median": round(statistics.median(samples), 6),
                "p10": percentile(samples, 10),
                "p90": percentile(samples, 90),
                "num_samples": len(samples),
            }
        )


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the sample that `percent` of all are not above (nearest rank), rounded to six digits."""
    ordered = sorted(samples)
    return round(ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)], 6)


def append(path: Path | None, line: dict[str, Any]) -> None:
    """Add a line to a results file; a lost run leaves what it had measured.

    Raises  RoseError with the line where the file cannot be written: it may have taken minutes
    """
    if path is None:
        return
    text = json.dumps(line)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text + "\n")
    except OSError as error:
        raise RoseError(f"{path} cannot be written ({error.strerror}); it lacks {text}") from error


def git_commit() -> str:
    """Return the commit of this source, marked where the source differs from it; result files do not count."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", str(PACKAGE))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("-dirty" if changed else "")


def _git(*words: str) -> str:
    return subprocess.check_output(
        ["git", "-C", str(PACKAGE), *words], text=True, stderr=subprocess.DEVNULL
    ).strip()


def _clocks() -> str:
    query = "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm,power.limit"
    try:
        return subprocess.check_output(
            ["nvidia-smi", query, "--format=csv,noheader"], text=True, stderr=subprocess.DEVNULL
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
