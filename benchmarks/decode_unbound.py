"""Decide on the E4M3 experts of benchmarks/unbound in one call: never a wrong bit, and faster than what is bound?

    PYTHONPATH=src python benchmarks/decode_unbound.py [--ops 20b 120b] [--batches 32 49 64 96 128 192 256]
        [--out FILE.jsonl] [--seconds 240]

Sources are compiled side by side and each model runs in a process of its own. For each number of tokens, every launch
shape is held against the reference, then run again and again (decode_repeat.py: no bit may differ), then timed in two
rounds beside what the registry binds there. A shape that was wrong once is out. JSON lines: `repeat_MODEL`,
`moe_MODEL` (microseconds of both rounds), `decide_MODEL`; a table of the decisions comes last, with the numbers of
tokens from which on the E4M3 experts are to be bound.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import decode_repeat
import decode_variants as common
import torch
from decode_repeat import Contender, Firsts, differing
from decode_variants import EXPERTS, Recorder
from decode_variants2 import RING, STREAM, run_all
from unbound import cuda_e4m3_impl as e4m3

from rose.kernels import registry
from rose.kernels.cases import compare
from rose.kernels.check import cases_module
from rose.kernels.moe_experts.reference import reference
from rose.utils.device import DeviceFacts, detect

BATCHES = (32, 49, 64, 96, 128, 192, 256)
LEAST_GAIN = 0.02
"""A guess: less than the smallest gain seen so far (3 %), more than two rounds of one kernel should differ by."""
ROUNDS = 2
INPUTS, TURNS = 4, decode_repeat.TURNS
"""Of a launch shape's repeated runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where it runs: a GPU, or what a test puts in its place."""

    device: str
    facts: DeviceFacts
    time: Any
    """(call(i), copies) -> microseconds a call, as `time_call`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a number of tokens of one model came to."""

    batch: int
    bound: str
    bound_us: float | None
    best: str | None
    """The fastest of the E4M3 shapes that are right."""
    best_us: float | None
    wrong: tuple[str, ...]
    """Configs that were."""
    late: int
    """Contenders there was no time for."""

    @property
    def gain(self) -> float | None:
        """Return the part of the bound kernel's time that is saved."""
        if self.bound_us is None or self.best_us is None:
            return None
        return 1 - self.best_us / self.bound_us

    @property
    def verdict(self) -> str:
        """Return "bind", "keep", or why neither can be said."""
        if self.bound in self.wrong:
            return "what is bound is wrong"
        if self.gain is None:
            return "keep" if self.best is None and self.late == 0 else "no time"
        return "bind" if self.gain >= LEAST_GAIN else "keep"


def sizes_of(model: str) -> dict[str, int]:
    """Return the sizes of a model's layer."""
    return {"D": common.D, "I": common.INNER, "E": EXPERTS[model], "K": common.K}


def bound(model: str, batch: int, facts: DeviceFacts) -> Contender:
    """Return what the registry binds, whose name starts with "bound".

    Raises  LookupError where that is neither the stream nor the ring
    """
    sizes = sizes_of(model)
    formats = {"activation": "bf16", "weight": "mxfp4"}
    table = registry.bind("moe_experts", formats=formats, sizes=sizes, device=facts).table
    function = next(
        i.function
        for r, i in table.items()
        if r.phase == "decode" and r.min_rows <= batch <= r.max_rows
    )
    if function is RING.moe_experts:
        return Contender("bound ring", RING.EXPERTS, RING.CHOSEN)
    if function is STREAM.moe_experts:
        return Contender("bound stream", STREAM.EXPERTS, STREAM.choose(batch, sizes))
    raise LookupError(f"{model}, {batch} tokens: {function} is bound, which is not compared here")


def contenders(model: str, batch: int, facts: DeviceFacts) -> Iterator[Contender]:
    """Yield what is bound, then the E4M3 shapes that fit."""
    yield bound(model, batch, facts)
    for shape in e4m3.SHAPES:
        if e4m3.fits(shape, batch, sizes_of(model)):
            yield Contender("e4m3", e4m3.EXPERTS, shape)


def mistake(
    contender: Contender, calls: list[dict[str, Any]], wanted: list[torch.Tensor]
) -> str | None:
    """Return what is wrong against the reference, or None."""
    module = cases_module("moe_experts")
    for call, right in zip(calls, wanted, strict=True):
        call["out_TD"].fill_(float("nan"))
        contender.experts.launch(contender.shape, **call)
        case = module._case("x", len(right), {"D": right.shape[1]})
        wrong = compare("out", call["out_TD"], right, module.tolerance(case))
        if wrong is not None:
            return str(wrong)[:300]
    return None


class Trial:
    """One number of tokens of one model."""

    def __init__(
        self, model: str, batch: int, machine: Machine, out: Recorder, deadline: float
    ) -> None:
        self.model, self.batch, self.machine, self.out = model, batch, machine, out
        self.deadline, self.late = deadline, 0
        self.wrong: list[str] = []

    def run(self, candidates: list[Contender], layers: list[Any]) -> Decision:
        """Check, repeat, time and decide."""
        calls, _ = common._moe_calls(
            self.batch, layers[0].down.shape[0], layers, self.machine.device
        )
        right = self._right_ones(candidates, calls)
        us = self._times(right, calls)
        first, *others = candidates
        best = min((c.config for c in others if c.config in us), key=us.__getitem__, default=None)
        decision = Decision(
            batch=self.batch, bound=first.config, bound_us=us.get(first.config), best=best,
            best_us=us[best] if best else None, wrong=tuple(self.wrong), late=self.late,
        )  # fmt: skip
        self.out.add(
            op=f"decide_{self.model}", batch=self.batch, bound=decision.bound, bound_us=decision.bound_us,
            best=best, best_us=decision.best_us, gain=decision.gain, wrong=self.wrong, late=self.late,
            verdict=decision.verdict,
        )  # fmt: skip
        return decision

    def _is_late(self) -> bool:
        if time.time() <= self.deadline:
            return False
        self.late += 1
        return True

    def _right_ones(
        self, candidates: list[Contender], calls: list[dict[str, Any]]
    ) -> list[Contender]:
        wanted = []
        for call in calls[:2]:
            other = {**call, "out_TD": torch.empty_like(call["out_TD"], dtype=torch.float32)}
            reference(**other)
            wanted.append(other["out_TD"])
        first: Firsts = {}
        right = []
        for contender in candidates:
            if self._is_late():
                continue
            line = {"op": f"repeat_{self.model}", "batch": self.batch, "config": contender.config}
            error = mistake(contender, calls[:2], wanted)
            if error is not None:
                self.wrong.append(contender.config)
                self.out.add(**line, error=error)
                continue
            different = differing(contender, calls[:INPUTS], first, TURNS)
            self.out.add(
                **line,
                runs=INPUTS * TURNS,
                different_act=different["act"],
                different_y=different["y"],
            )
            if any(different.values()):
                self.wrong.append(contender.config)
            else:
                right.append(contender)
        return right

    def _times(self, right: list[Contender], calls: list[dict[str, Any]]) -> dict[str, float]:
        """Return the mean of the rounds by config; every second round goes the other way, since the chip warms up."""
        rounds: dict[str, list[float]] = {}
        for number in range(ROUNDS):
            for contender in right if number % 2 == 0 else right[::-1]:
                if self._is_late():
                    continue
                us = self.machine.time(
                    lambda i, c=contender: c.experts.launch(c.shape, **calls[i]), len(calls)
                )
                rounds.setdefault(contender.config, []).append(us)
        for config, found in rounds.items():
            line = {"op": f"moe_{self.model}", "batch": self.batch, "config": config}
            self.out.add(**line, rounds_us=found, mean_us=sum(found) / len(found))
        return {config: sum(found) / len(found) for config, found in rounds.items()}


def table(model: str, decisions: list[Decision]) -> str:
    """Return the decisions in words, and from which number of tokens on the E4M3 experts are to be bound."""

    def number(us: float | None) -> str:
        return f"{us:8.1f}" if us is not None else " " * 7 + "-"

    lines = [f"{model}: tokens, what is bound, us, fastest right E4M3, us, saved, verdict"]
    for d in decisions:
        gain = f"{100 * d.gain:5.1f} %" if d.gain is not None else "      -"
        both = f"{d.bound:42} {number(d.bound_us)} {d.best or 'none':38} {number(d.best_us)}"
        lines.append(f"{d.batch:4} {both} {gain} {d.verdict}")
        lines += [f"     WRONG: {config}" for config in d.wrong]
    from_on = None
    for d in sorted(decisions, key=lambda d: -d.batch):
        if d.verdict != "bind":
            break
        from_on = d.batch
    lines.append(
        f"{model}: bind E4M3 from {from_on} tokens on"
        if from_on
        else f"{model}: keep what is bound"
    )
    return "\n".join(lines)


def decide(model: str, args: argparse.Namespace, machine: Machine) -> list[Decision]:
    """Go through the numbers of tokens of one model; print as it goes, the table last."""
    out = Recorder(args.out, None)
    layers = common.expert_layers(EXPERTS[model], device=machine.device)
    decisions = []
    for number, batch in enumerate(args.batches):
        left = args.deadline - time.time()
        deadline = time.time() + left / (len(args.batches) - number)
        trial = Trial(model, batch, machine, out, deadline)
        decisions.append(trial.run(list(contenders(model, batch, machine.facts)), layers))
        print(table(model, decisions[-1:]).splitlines()[1], flush=True)
    print(table(model, decisions), flush=True)
    return decisions


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", nargs="+", default=["20b", "120b"], choices=list(EXPERTS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=240, help="for everything")
    parser.add_argument("--do", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Compile; then a process for each model, which exits with 1 where something was wrong."""
    args = parse()
    if args.do is None:
        return run_all(args, [STREAM.LIBRARY, RING.LIBRARY, e4m3.LIBRARY], __file__)
    machine = Machine(device="cuda", facts=detect("cuda"), time=common.time_call)
    return 1 if any(d.wrong for d in decide(args.do, args, machine)) else 0


if __name__ == "__main__":
    sys.exit(main())
