"""What the cells of the score table are held against: figures of others, with their sources, in targets.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FIELDS = {
    "prefill": ("tokens",),
    "decode": ("batch", "context"),
    "decode_filled": ("batch", "context"),
    "start": ("cached",),
}
"""What tells the cells of a bench apart, beside the model and its parallelism."""

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of the score table."""

    key: Key
    unit: str
    seed: float | None
    peer: float | None
    must: float
    goal: float | None
    floor: float | None

    @property
    def bench(self) -> str:
        """prefill, decode or start."""
        return self.key[0]

    @property
    def model(self) -> str:
        """20b or 120b."""
        return self.key[1]

    @property
    def numbers(self) -> dict[str, Any]:
        """What tells the cell apart within its bench."""
        fields = FIELDS[self.bench]
        return dict(zip(fields, self.key[-len(fields) :], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The data file."""

    sources: dict[str, str]
    machine: str
    cells: dict[Key, Cell]
    seed_prefill: list[dict[str, Any]]
    """Published latencies of the seed, for every number of GPUs."""
    prefill_many: list[dict[str, Any]]


def key(line: dict[str, Any]) -> Key:
    """Return the cell of a prefill, decode or start line.

    Raises  KeyError for a missing field
    """
    parallel = (line.get(k, 1) for k in ("tp", "ep", "dp"))
    fields = FIELDS[line["bench"]]
    return (line["bench"], line["model"], *parallel, *(line[f] for f in fields))


@cache
def load_targets() -> Targets:
    """Read the data file of the package."""
    content = json.loads(Path(__file__).with_name("targets.json").read_text())
    figures = ("unit", "seed", "peer", "must", "goal", "floor")
    cells = [Cell(key=key(c), **{f: c[f] for f in figures}) for c in content["cells"]]
    return Targets(
        sources=content["sources"],
        machine=content["machine"],
        cells={c.key: c for c in cells},
        seed_prefill=content["seed_prefill"],
        prefill_many=content["prefill_many"],
    )
