"""One JSON line per measured cell, with what is needed to repeat it. Fields as the score table reads them."""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where figures come from: the same for every line of one run."""

    device: str
    commit: str
    command: str
    config: str
    clocks: str

    @classmethod
    def here(cls, *, config: str, commit: str | None = None) -> Origin:
        """Describe this process; `commit` is given where the tree travels without its repository."""
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return cls(
            device=name,
            commit=commit or _git_commit(),
            command=shlex.join(["python", "-m", "rose.cli.main", *sys.argv[1:]]),
            config=config,
            clocks=_clocks(),
        )

    def line(self, bench: str, samples: Sequence[float], **fields: Any) -> dict[str, Any]:
        """Return a line with median, 10th and 90th percentile of `samples`."""
        ordered = sorted(samples)
        return {
            "bench": bench,
            **fields,
            "median": round(statistics.median(ordered), 6),
            "p10": round(ordered[len(ordered) // 10], 6),
            "p90": round(ordered[-1 - len(ordered) // 10], 6),
            "num_samples": len(ordered),
            "config": self.config,
            "device": self.device,
            "commit": self.commit,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": self.command,
            "clocks": self.clocks,
        }


def append(path: Path | None, line: dict[str, Any]) -> None:
    """Add a line to a results file; a lost run leaves what it had measured."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _git_commit() -> str:
    try:
        commit = subprocess.check_output(
            ["git", "rev-parse", "--short=12", "HEAD"], text=True, stderr=subprocess.DEVNULL
        ).strip()
        status = subprocess.check_output(["git", "status", "--porcelain"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("-dirty" if status.strip() else "")


def _clocks() -> str:
    query = "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm,power.limit"
    try:
        return subprocess.check_output(
            ["nvidia-smi", query, "--format=csv,noheader"], text=True, stderr=subprocess.DEVNULL
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
