"""Result files: read, refused line by line where a line cannot be trusted, the newest line of a cell kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rose.bench.cost import PRICED_DEVICE, is_priced
from rose.bench.targets import FIELDS, Key, key
from rose.utils.errors import RoseError
from rose.utils.text_file import read_text

Line = dict[str, Any]
WANTED = "the JSON lines that rose bench --json wrote"
ORIGIN = ("median", "config", "device", "commit", "date", "command")
TABLES = {
    "load": ("model", "device", "input_tokens", "output_tokens", "in_flight", "timed"),
    "mixed": ("model", "device", "batch", "context", "prompt_tokens"),
    "prefill_many": ("model", "device", "prompts", "tokens"),
    "growth": ("model", "device", "steps", "batch", "prompt_tokens", "output_tokens"),
    "kernel": ("operation", "case", "implementation", "device"),
    "accuracy": ("model", "device", "config", "layers", "tokens"),
}
"""What tells the lines of the other benches apart."""


@dataclass(slots=True)
class Results:
    """The newest line of each cell, and what was not taken."""

    cells: dict[Key, Line] = field(default_factory=dict)
    """Prefill, decode and start lines that count, those outside the score table included."""
    options: list[Line] = field(default_factory=list)
    """Prefill, decode and start lines marked as options, the newest of each cell and configuration."""
    others: dict[str, list[Line]] = field(default_factory=dict)
    """Bench -> newest lines, in the order of their first appearance."""
    refused: list[str] = field(default_factory=list)
    """Where, and why."""
    num_aside: int = 0
    """Lines of other tools, kernels that failed, and options of benches that have no table of them."""


def faults(line: Line) -> list[str]:
    """Return why a prefill, decode or start line cannot count."""
    found = [f"no {name}" for name in ORIGIN if name not in line]
    if not is_priced(line):
        found.append(f"device {line.get('device')!r} is no {PRICED_DEVICE}")
    if "dirty" in line.get("commit", ""):
        found.append("the source differed from its commit")
    if line["bench"] != "start":
        if line.get("kv") != "bf16":
            found.append(f"kv is {line.get('kv')!r}, bf16 counts")
        if "distinct_experts" not in line:
            found.append("no distinct_experts")
    return found


def read(paths: Iterable[Path]) -> Results:
    """Read result files.

    Raises  RoseError for a file that is absent or a line that is no JSON object
    """
    results = Results()
    options: dict[Any, Line] = {}
    others: dict[str, dict[Any, Line]] = {}
    for path in paths:
        for place, line in _lines(path):
            bench = str(line.get("bench"))
            if bench in FIELDS:
                _take(results, options, place, line)
            elif line.get("option"):
                results.num_aside += 1  # not in the place of a line that counts
            elif all(line.get(name) is not None for name in TABLES.get(bench, ("no table",))) and (
                "error" not in line
            ):
                _newest(others.setdefault(bench, {}), _apart(line, TABLES[bench]), line)
            else:
                results.num_aside += 1
    results.options = list(options.values())
    results.others = {bench: list(lines.values()) for bench, lines in others.items()}
    return results


def _lines(path: Path) -> Iterable[tuple[str, Line]]:
    if not path.is_file():
        raise RoseError(f"{path} is not a file; give {WANTED}")
    content = read_text(path, wanted=WANTED)
    for number, text in enumerate(content.splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise RoseError(f"{path}:{number} is no JSON ({error}); remove the line") from None
        if not isinstance(line, dict):
            raise RoseError(f"{path}:{number} is no JSON object; remove the line")
        yield f"{path}:{number}", line


def _apart(line: Line, names: Iterable[str]) -> tuple[Any, ...]:
    """Return what tells a line apart; for how long it was timed does not: the newest counts, not the longest."""
    return tuple(
        re.sub(r"[\d.e+-]+ s at most", "", line[name]) if name == "timed" else line[name]
        for name in names
    )


def _take(results: Results, options: dict[Any, Line], place: str, line: Line) -> None:
    if line.get("option"):
        name = (line["bench"], *(line.get(f) for f in ("model", "config", "device", "kv")))
        numbers = tuple(line.get(f) for f in FIELDS[line["bench"]])
        _newest(options, (*name, *numbers), line)
        return
    try:
        cell = key(line)
    except KeyError as error:
        results.refused.append(f"{place}: no {error.args[0]}")
        return
    found = faults(line)
    if found:
        results.refused.append(f"{place}: {', '.join(found)}")
        return
    _newest(results.cells, cell, line)


def _newest(table: dict[Any, Line], cell: Any, line: Line) -> None:
    """Keep the newest line, not the best one; of two of one date the later in the files."""
    if line.get("date", "") >= table.get(cell, {}).get("date", ""):
        table[cell] = line
