"""`rose bench kernels`: every implementation timed over its cases, each line with its origin.

Needs torch alone, so that `python -m rose.bench.kernels` runs on a machine with nothing else installed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rose.bench.record import Origin, append
from rose.kernels.bench import bench_all
from rose.utils.device import detect
from rose.utils.errors import RoseError


def run_kernels(
    *,
    operations: list[str],
    device: str,
    implementation: str | None,
    case: str | None,
    path: Path | None,
    commit: str | None,
    say: Callable[[str], None],
    command: str | None = None,
) -> bool:
    """Time and record; return whether every implementation that ran was right."""
    facts = detect(device)
    origin = Origin.here(device=facts.name, config="kernels", commit=commit, command=command)
    is_right, num_lines = True, 0
    for line in bench_all(facts, operations=operations, only=implementation, case_name=case):
        is_right &= "error" not in line
        num_lines += 1
        append(path, origin.stamp(line))
        say(describe(line))
    say(f"{num_lines} timed on {facts.name}")
    return is_right


def describe(line: dict[str, Any]) -> str:
    """Return one line of result in words."""
    name = f"{line['operation']}/{line['implementation']} {line['case']}"
    if "error" in line:
        return f"{name}: {line['error']}"
    share = f", {line['share_of_limit']:.0%} of the limit" if "share_of_limit" in line else ""
    return (
        f"{name}: {line['median_us']} us (warm {line['warm_us']}), {line['tflops']} TFLOP/s, "
        f"{line['tb_per_s']} TB/s{share}"
    )


def main() -> int:
    """Run from the command line of a bare machine."""
    parser = argparse.ArgumentParser(prog="python -m rose.bench.kernels", description=__doc__)
    parser.add_argument("operations", nargs="*", help="operation names; all if none")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--implementation", metavar="NAME")
    parser.add_argument("--case", metavar="NAME")
    parser.add_argument("--json", dest="path", type=Path, metavar="FILE")
    parser.add_argument("--commit")
    command = shlex.join(["python", "-m", "rose.bench.kernels", *sys.argv[1:]])
    try:
        is_right = run_kernels(**vars(parser.parse_intermixed_args()), say=_say, command=command)
    except RoseError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0 if is_right else 1


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
