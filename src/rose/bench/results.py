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
NEEDED = {
    "load": ("output_tokens_per_s", "token_ms", "token_ms_p99", "first_token_ms", "first_token_ms_p99"),
    "mixed": ("median", "p99", "quiet_ms", "prompt_ms"),
    "prefill_many": ("tokens_per_s",),
    "growth": ("requests", "grown"),
    "kernel": ("median_us", "tflops", "tb_per_s"),
    "accuracy": ("relative_error_of_logits",),
}  # fmt: skip
"""What their tables show besides."""
PARTS = {
    "grown": ("allocated_bytes", "reserved_bytes", "taken_bytes", "resident_bytes"),
    "relative_error_of_logits": (
        "pytorch_bf16",
        "pytorch_bf16_last_tokens",
        "prefill",
        "decode_after_prefill",
    ),
}
"""Fields that are objects of numbers, and those that each has to have."""
TEXTS = (
    *("model", "config", "device", "kv", "commit", "date", "command", "timed"),
    *("operation", "case", "implementation"),
)
ABOVE_ZERO = (
    *("tokens", "batch", "context", "prompts", "input_tokens", "output_tokens", "in_flight"),
    *("tp", "ep", "dp", "gpus", "median", "median_us", "token_ms"),
    *("tokens_per_s", "output_tokens_per_s"),
)
NUMBERS = (
    *("layers", "steps", "requests", "prompt_tokens", "distinct_experts", "p99", "quiet_ms"),
    *("prompt_ms", "first_token_ms", "first_token_ms_p99", "token_ms_p99"),
    *("floor_us", "share_of_limit", "tflops", "tb_per_s"),
)
"""Fields by what they have to hold, in lines of any bench that has them."""
MOST, LEAST = 1e18, 1e-12
"""Beyond all that is measured; within them nothing that is done with numbers overflows."""


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


def mistyped(line: Line) -> list[str]:
    """Return which fields are not of the kind that reports print, order or divide by, and which parts are missing."""
    found = [f"{n} is {_short(line[n])}, no text" for n in TEXTS if not _is_text(line.get(n, ""))]
    for names, least, kind in ((ABOVE_ZERO, LEAST, "number above 0"), (NUMBERS, -MOST, "number")):
        wrong = (n for n in names if n in line and not _is_number(line[n], least))
        found += [f"{n} is {_short(line[n])}, no {kind}" for n in wrong]
    if not isinstance(line.get("cached", False), bool):
        found.append(f"cached is {_short(line['cached'])}, neither true nor false")
    for name, needed in PARTS.items():
        parts = line.get(name, dict.fromkeys(needed, 1))
        if not isinstance(parts, dict):
            found.append(f"{name} is {_short(parts)}, no object")
            continue
        rounded = "pytorch_bf16_kv_rounded"
        more = (f"{rounded}_last_tokens",) if rounded in parts else ()
        found += [f"no {part} in {name}" for part in (*needed, *more) if part not in parts]
        # Ratios are over PyTorch's errors.
        found += [
            f"{part} in {name} is {_short(x)}, no number that can be taken"
            for part, x in parts.items()
            if not _is_number(x, LEAST if part.startswith("pytorch") else -MOST)
        ]
    return found


def _is_text(value: Any) -> bool:
    """Whether it can be printed: half a pair of surrogates fits no file, the end of a line ends a table."""
    return isinstance(value, str) and value.isprintable()


def _is_number(value: Any, least: float) -> bool:
    """Whether it is a number within bounds; nan is within none, and true is no number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= MOST


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


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
            wrong = mistyped(line) if bench in FIELDS or _is_whole(line, bench) else []
            if wrong:
                results.refused.append(f"{place}: {', '.join(wrong)}")
            elif bench in FIELDS:
                _take(results, options, place, line)
            elif line.get("option"):
                results.num_aside += 1  # not in the place of a line that counts
            elif _is_whole(line, bench):
                lacks = [f"no {name}" for name in NEEDED[bench] if name not in line]
                if lacks:
                    results.refused.append(f"{place}: {', '.join(lacks)}")
                else:
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
        # Not its own error alone: numbers of thousands of digits, thousands of brackets.
        except (ValueError, RecursionError) as error:
            raise RoseError(f"{path}:{number} is no JSON ({error}); remove the line") from None
        if not isinstance(line, dict):
            raise RoseError(f"{path}:{number} is no JSON object; remove the line")
        yield f"{path}:{number}", line


def _is_whole(line: Line, bench: str) -> bool:
    """Whether a line of another bench is ours, by the fields that tell it apart, and no failure."""
    names = TABLES.get(bench, ("no table",))
    return all(line.get(name) is not None for name in names) and "error" not in line


def _apart(line: Line, names: Iterable[str]) -> tuple[Any, ...]:
    """Return what tells a line apart; for how long it was timed does not: the newest counts, not the longest."""
    return tuple(
        re.sub(r"[\d.e+-]+ s at most", "", line[name]) if name == "timed" else line[name]
        for name in names
    )


def _take(results: Results, options: dict[Any, Line], place: str, line: Line) -> None:
    try:
        cell = key(line)
    except KeyError as error:
        results.refused.append(f"{place}: no {error.args[0]}")
        return
    if line.get("option") and "median" in line:
        _newest(options, (*cell, *(line.get(f) for f in ("config", "device", "kv"))), line)
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
