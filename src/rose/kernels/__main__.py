"""`python -m rose.kernels list | explain | check | bench | sanitize | aot`: what exists, what would run, is it right,
is it fast, does it touch memory that is not its own, does it compile for Hopper where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from rose.kernels import registry
from rose.kernels.bench import bench_all
from rose.kernels.build import define_in_all
from rose.kernels.cases import Case
from rose.kernels.check import cases_module, check_all, require_names
from rose.kernels.registry import Regime
from rose.kernels.sanitize import (
    TOOLS,
    find_sanitizer,
    run_trials,
    sanitizer_command,
    side_by_side_defines,
    trials_of,
)
from rose.utils.device import DeviceFacts, detect
from rose.utils.errors import RoseError

EXIT_INTERRUPTED = 130
"""128 and the number of SIGINT, as shells count."""


class _Parser(argparse.ArgumentParser):
    """Answers a mistake with one line, as the other commands of rose do."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a server resolves on a device; this package knows no configuration."""

    formats: dict[str, str]
    """Operand -> format, of those that the weights do not decide."""
    is_batch_invariant: bool


def main(
    argv: Sequence[str] | None = None,
    *,
    prog: str = "python -m rose.kernels",
    served: Callable[[DeviceFacts], Served] | None = None,
) -> int:
    """Run one verb; return 1 where a check failed, 2 where none was named.

    `argv` None: the arguments of the process. `served`: what `explain` begins with; None: with each first case.
    """
    parser = _Parser(prog=prog, description=(__doc__ or "").replace("python -m rose.kernels", prog))
    verbs = ["list", "explain", "check", "bench", "sanitize", "aot"]
    parser.add_argument("verb", choices=verbs)
    parser.add_argument("operations", nargs="*", default=[], help="operation names; all if none")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--only", metavar="NAME", help="all but aot: one implementation")
    parser.add_argument("--case", metavar="NAME", help="check, bench: one case")
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="check: run Triton kernels on CPU tensors in Triton's interpreter",
    )
    parser.add_argument(
        "--few", type=_count, metavar="N", help="check: at most N cases of each implementation"
    )
    parser.add_argument(
        "--toolchain",
        choices=registry.TOOLCHAINS,
        help="check, sanitize: only implementations written with it; sanitize without it: cuda",
    )
    parser.add_argument(
        "--tool", default=TOOLS[0], choices=TOOLS, help="sanitize: what to look for"
    )
    parser.add_argument("--small", action="store_true", help="check: leave large cases out")
    parser.add_argument(
        "--jobs",
        type=_count,
        metavar="N",
        help="sanitize: cases that reach all branches, each in a process of its own, N at a time",
    )
    parser.add_argument(
        "--limit", type=_count, default=120, metavar="SECONDS", help="sanitize --jobs: of each"
    )
    parser.add_argument("--commit", help="sanitize --jobs: named in its JSON lines")
    parser.add_argument(
        "--define",
        action="append",
        default=[],
        metavar="WORD",
        help="check: build the CUDA libraries with it (ROSE_WATCHDOG: a wait of two seconds traps)",
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, help="check, sanitize: seed of the random inputs"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="check, bench, sanitize --jobs: append JSON lines to FILE",
    )
    parser.add_argument("--cache", type=Path, metavar="DIR", help="aot: where results are kept")
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()  # as `rose bench` answers
        return 2
    # Intermixed: names of operations may stand behind options too; plain parsing takes no more of them there.
    arguments = parser.parse_intermixed_args(argv, argparse.Namespace(served=served))
    try:
        return globals()[f"_{arguments.verb}"](arguments)
    except RoseError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except OSError as error:
        if error.filename is None:  # no path that was named
            raise
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        return EXIT_INTERRUPTED


def _list(arguments: argparse.Namespace) -> int:
    operations = arguments.operations or registry.operation_names()
    _require_listed(operations, arguments.only)
    for name in operations:
        for i in registry.implementations(name):
            if arguments.only not in (None, i.name):
                continue
            _say(f"{name:20} {i.name:24} {i.band.name.lower():12} {i.device:5} {i.note}")
        for file, why in registry.left_out(name) if arguments.only is None else ():
            _say(f"{name:20} {file:24} {'left out':12} {'':5} {why}")
    return 0


def _require_listed(operations: Sequence[str], only: str | None) -> None:
    # The reference, which no check is of, is listed too.
    require_names(operations, implementation=None if only == "reference" else only, case=None)


def _explain(arguments: argparse.Namespace) -> int:
    device = detect(arguments.device)
    operations = arguments.operations or registry.operation_names()
    _require_listed(operations, arguments.only)  # before anything is said
    if arguments.served is None:
        served = Served(formats={}, is_batch_invariant=False)
        _say("in the formats of each first case; rose kernels explain begins with what is served:")
    else:
        served = arguments.served(device)
        _say("as rose serve binds where no option is given:")
    for name in operations:
        if arguments.only not in (None, *(i.name for i in registry.implementations(name))):
            continue
        cases = cases_module(name).CASES
        sizes, formats = cases[0].sizes, _served_formats(cases, served.formats)
        # The mode is one of layers; sampling and masks, for which no kernel claims it, are bound without it.
        is_invariant = served.is_batch_invariant and any(
            i.is_batch_invariant for i in registry.implementations(name)
        )
        mode = ", batch-invariant" if is_invariant else ""
        _say(f"{name} on {device.name}, formats {formats}, sizes {dict(sizes)}{mode}")
        lines = registry.explain(
            name, formats=formats, sizes=sizes, device=device, batch_invariant=is_invariant
        )
        kept = [line for line in lines if arguments.only in (None, line[1])]
        for regime, told in _joined(registry.load(name).regimes, kept):
            for implementation, why in told:
                _say(f"  {regime!s:16} {implementation:24} {why}")
    return 0


def _joined(
    regimes: Sequence[Regime], lines: Sequence[tuple[str, str, str]]
) -> list[tuple[Regime, list[tuple[str, str]]]]:
    """Return regimes with what is told of each, neighbours of a phase of which the same is told as one."""
    joined: list[tuple[Regime, list[tuple[str, str]]]] = []
    for regime in regimes:
        told = [(name, why) for of, name, why in lines if of == str(regime)]
        last, told_of_last = joined[-1] if joined else (None, [])
        if last is not None and last.phase == regime.phase and told_of_last == told:
            joined[-1] = (Regime(regime.phase, last.min_rows, regime.max_rows), told)
        else:
            joined.append((regime, told))
    return joined


def _served_formats(cases: Sequence[Case], served: dict[str, str]) -> dict[str, str]:
    """Return the formats of a case that match what is served; with the weights of the first case where one has them."""
    found = [
        dict(case.formats)
        for case in cases
        if all(case.formats.get(operand, name) == name for operand, name in served.items())
    ]
    weight = cases[0].formats.get("weight")
    return next((f for f in found if f.get("weight") == weight), found[0])


def _check(arguments: argparse.Namespace) -> int:
    counts = {"ok": 0, "failed": 0, "skipped": 0}
    skipped: Counter[str] = Counter()
    if arguments.interpret:
        # Before any kernel file is imported: triton.jit decides there what it returns.
        os.environ["TRITON_INTERPRET"] = "1"
    define_in_all(arguments.define)  # before the libraries are made, likewise
    for outcome in check_all(
        detect("cpu" if arguments.interpret else arguments.device),
        operations=arguments.operations,
        only=arguments.only,
        case_name=arguments.case,
        seed=arguments.seed,
        interpret=arguments.interpret,
        few=arguments.few,
        toolchain=arguments.toolchain,
        is_small=arguments.small,
    ):
        counts[outcome.status] += 1
        _append(arguments.json, asdict(outcome))
        if outcome.status == "skipped":
            skipped[outcome.detail] += 1
        else:
            _say(
                f"{outcome.status:7} {outcome.operation}/{outcome.implementation} "
                f"{outcome.case} {outcome.detail}"
            )
    for reason, count in skipped.most_common():
        _say(f"skipped {count}: {reason}")
    if not any(counts.values()):
        names = arguments.operations or registry.operation_names()
        absent = sorted({f"{file} ({why})" for n in names for file, why in registry.left_out(n)})
        _say(
            "nothing to check: no implementation that was asked for runs here"
            + (f"; left out: {', '.join(absent)}" if absent else "")
        )
    _say(", ".join(f"{n} {status}" for status, n in counts.items()))
    return 1 if counts["failed"] else 0


def _sanitize(arguments: argparse.Namespace) -> int:
    if arguments.jobs is not None:
        return _sanitize_side_by_side(arguments)
    checked = [*arguments.operations, "--seed", str(arguments.seed)]
    for name in ("only", "case", "few"):
        value = getattr(arguments, name)
        checked += [] if value is None else [f"--{name}", str(value)]
    command, environment = sanitizer_command(
        checked, toolchain=arguments.toolchain or "cuda", tool=arguments.tool
    )
    return subprocess.run(command, env={**os.environ, **environment}, check=False).returncode


def _sanitize_side_by_side(arguments: argparse.Namespace) -> int:
    find_sanitizer()  # before anything is compiled
    # So that what runs is ended too; a process that is ended by a signal leaves it behind.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    define_in_all(side_by_side_defines(arguments.tool))  # before the libraries are made
    trials = trials_of(
        arguments.operations or registry.operation_names(),
        detect(arguments.device),
        only=arguments.only,
        case_name=arguments.case,
        seed=arguments.seed,
    )
    counts: Counter[str] = Counter()
    for verdict in run_trials(
        trials, tool=arguments.tool, jobs=arguments.jobs, limit=arguments.limit
    ):
        counts[verdict.verdict] += 1
        _append(arguments.json, {**asdict(verdict), "commit": arguments.commit})
        _say(
            f"{verdict.verdict:8} {verdict.implementation} {verdict.case}, {verdict.seconds:.0f} s: {verdict.told}"
        )
    _say(", ".join(f"{n} {verdict}" for verdict, n in counts.items()) or "no case to look at")
    return 0 if set(counts) == {"clean"} else 1


def _bench(arguments: argparse.Namespace) -> int:
    failed, num_lines = False, 0
    left_out: list[str] = []
    for line in bench_all(
        detect(arguments.device),
        operations=arguments.operations,
        only=arguments.only,
        case_name=arguments.case,
        untimed=lambda name, why: left_out.append(f"{name}: nothing is timed here: {why}"),
    ):
        num_lines += 1
        failed |= "error" in line
        _say(
            f"{line['operation']}/{line['implementation']} {line['case']}: "
            + (
                line.get("error")
                or f"{line['median_us']} us (warm {line['warm_us']}), {line['tflops']} TFLOP/s, "
                f"{line['tb_per_s']} TB/s, {line.get('share_of_limit', 0):.0%} of the limit"
            )
        )
        _append(arguments.json, line)
    # Who asked for all, or for one implementation, knows that many operations have nothing here.
    for text in left_out if arguments.operations or not num_lines else ():
        _say(text)
    return 1 if failed or not num_lines else 0


def _aot(arguments: argparse.Namespace) -> int:
    from rose.kernels import aot

    wrong: list[str] = []
    for name in arguments.operations or registry.operation_names():
        compiled = aot.compile_operation(
            name, cache=arguments.cache or aot.default_cache(), say=_say
        )
        for c in compiled:
            _say(
                f"{c.name}: {c.registers} registers, {c.spill_bytes} bytes spilled, {c.shared_bytes} bytes shared"
                + (f", {' '.join(c.matrix_instructions)}" if c.matrix_instructions else "")
            )
        wrong += aot.problems(name, compiled)
    for text in wrong:
        _say(f"problem: {text}")
    _say(f"{len(wrong)} problems")
    return 1 if wrong else 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _seed(text: str) -> int:
    # torch's generators take 64 bits, signed or not; the other commands of rose take these.
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 to 2**63 - 1")
    return int(text)


def _append(path: Path | None, line: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
