"""What `rose bench` does: build once, measure the parts asked for, print a table, append JSON lines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from rose.bench.estimate import warn_of_minutes
from rose.bench.growth import growth
from rose.bench.load import closed_loop, mixed, mixed_tokens
from rose.bench.progress import BenchProgress
from rose.bench.record import percentile
from rose.bench.session import Session
from rose.bench.sweep import CACHED_REPEATS
from rose.utils.errors import ConfigError

Cell = partial[None]
Part = list[Cell]
"""Cells of one kind, to be measured on an engine that other parts share."""


def run_parts(
    parts: Sequence[Part], *, asked: Sequence[Collection[str]] | None = None, **options: Any
) -> int:
    """Measure all parts on one engine; return 1 where what was asked for gave no figure, else 0.

    That is a cell that failed or came too late to begin, a part all of whose cells are left out, and a number of which
    all cells are. Usual cells are for a large GPU: some of them may be left out elsewhere.

    Units    asked: per part, the arguments of its cells that somebody chose; None: nobody chose any
    Raises   ConfigError, before anything is built, where prompts are to be made up and there is no cache to hold them
    Whoever interrupts is told the cells that were measured before.
    """
    is_filled = any(cell.keywords.get("is_filled") for part in parts for cell in part)
    if is_filled and not options.get("prefix_cache", True):
        raise ConfigError(
            "--fill was asked for without a prefix cache to fill; leave out one of --fill and --no-prefix-cache"
        )
    with BenchProgress().running() as progress:
        session = Session(progress, **options)
        cells = [cell for part in parts for cell in part]
        warn_of_minutes(session, [cell.keywords for cell in cells])
        progress.expect(len(cells))
        try:
            for part, names in zip(parts, asked or [()] * len(parts), strict=True):
                _run_part(session, part, names)
        except KeyboardInterrupt:
            session.report()
            raise
    return session.report()


def _run_part(session: Session, part: Part, asked: Collection[str]) -> None:
    missing = []
    for cell in part:
        before = len(session.left_out)
        cell(session)
        if len(session.left_out) > before:
            missing.append(cell)
    if part and len(missing) == len(part):
        session.fail(_kind(part[0]), "all its cells were left out")
        return
    for name in sorted(asked):
        found = {cell.keywords[name] for cell in part if cell not in missing}
        for value in sorted({cell.keywords[name] for cell in missing} - found):
            session.fail(f"{_kind(part[0])} with {name}={value}", "all such cells were left out")


def _kind(cell: Cell) -> str:
    return cell.func.__name__.strip("_")


def prefill_part(*, tokens: list[int], prompts: int, repeats: int) -> Part:
    """Return prompt lengths, one prompt at a time or many at once."""
    if prompts == 1:
        return [partial(Session.prefill, tokens=n, repeats=repeats) for n in tokens]
    return [
        partial(Session.prefill_many, tokens=n, num_prompts=prompts, repeats=repeats)
        for n in tokens
    ]


def decode_part(
    *,
    batches: list[int],
    context: list[int],
    repeats: int = CACHED_REPEATS,
    fill: bool = False,
) -> Part:
    """Return batch sizes at each context; `fill`: prompts enter the prefix cache without being computed."""
    return [
        partial(Session.decode, batch=batch, context=number, repeats=repeats, is_filled=fill)
        for number in context
        for batch in batches
    ]


def load_part(
    *,
    input_tokens: list[int],
    output_tokens: int,
    in_flight: list[int],
    rounds: int,
    seconds: float | None = None,
    fill: bool = False,
) -> Part:
    """Return the closed loop at each prompt length and number of requests in flight."""
    return [
        partial(
            _load,
            in_flight=number,
            input_tokens=length,
            output_tokens=output_tokens,
            rounds=rounds,
            seconds=seconds,
            is_filled=fill,
        )
        for length in input_tokens
        for number in in_flight
    ]


def mixed_part(*, batch: int, context: int, prompt_tokens: int, repeats: int) -> Part:
    """Return the token gaps of decoding sequences while a long prompt enters."""
    return [
        partial(_mixed, batch=batch, context=context, prompt_tokens=prompt_tokens, repeats=repeats)
    ]


def growth_part(*, steps: int, batch: int, prompt_tokens: int, output_tokens: int) -> Part:
    """Return the growth of memory over many steps."""
    return [
        partial(
            _growth,
            steps=steps,
            batch=batch,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
        )
    ]


def _load(
    session: Session,
    *,
    in_flight: int,
    input_tokens: int,
    output_tokens: int,
    rounds: int,
    seconds: float | None,
    is_filled: bool,
) -> None:
    cell = f"load {input_tokens}/{output_tokens}, {in_flight} in flight"
    if not session.fits(cell, sequences=in_flight, tokens=input_tokens + output_tokens):
        return
    with session.measuring(cell):
        if is_filled:
            session.make_up_kv()
        session.progress.now(cell)
        _load_of_fitting(
            session, in_flight, input_tokens, output_tokens, rounds, seconds, is_filled=is_filled
        )


def _load_of_fitting(
    session: Session,
    in_flight: int,
    input_tokens: int,
    output_tokens: int,
    rounds: int,
    seconds: float | None,
    *,
    is_filled: bool,
) -> None:
    device, steps = session.engine.model.device, session.engine.counters.num_steps
    late = session.engine.count_late_kernels()
    held = _held_bytes(device)
    result = closed_loop(
        session.engine,
        session.prompts,
        in_flight=in_flight,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        requests=in_flight * rounds,
        seconds=seconds,
        is_filled=is_filled,
        now=session.progress.now if session.progress.is_moving else lambda _text: None,
    )
    first, token = result.first_token_ms, result.token_ms
    timed = "whole requests" if seconds is None else f"what was seen, {seconds:g} s at most"
    session.record(
        "load",
        token,
        timed=timed + ", first prompts made up" * is_filled,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        in_flight=in_flight,
        requests=result.num_requests,
        steps=session.engine.counters.num_steps - steps,
        memory_growth_bytes=_held_bytes(device) - held,
        late_kernels=session.engine.count_late_kernels() - late,
        step_ms=round(statistics.median(result.step_ms), 3),
        step_ms_p99=percentile(result.step_ms, 99),
        step_ms_most=round(max(result.step_ms), 3),
        seconds=round(result.seconds, 3),
        output_tokens_per_s=round(result.output_tokens_per_s, 2),
        token_ms=round(statistics.median(token), 4),
        token_ms_p99=percentile(token, 99),
        first_token_ms=round(statistics.median(first), 3),
        first_token_ms_p99=percentile(first, 99),
    )
    session.progress.say(
        f"  {result.output_tokens_per_s:.1f} output tokens/s, first token {statistics.median(first):.1f} ms "
        f"(p99 {percentile(first, 99):.1f}), per token {statistics.median(token):.2f} ms "
        f"(p99 {percentile(token, 99):.2f})"
    )


def _held_bytes(device: torch.device) -> int:
    """Return the bytes of tensors on the device: between cells nothing runs, so they should not grow."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _mixed(session: Session, *, batch: int, context: int, prompt_tokens: int, repeats: int) -> None:
    cell = f"mixed {batch} x {context} with a prompt of {prompt_tokens}"
    # The prompt takes pages beside the others: counted as if all had the room of the longest.
    longest = mixed_tokens(session.engine, batch, context, prompt_tokens)
    if not session.fits(cell, sequences=batch + 1, tokens=max(longest, context)):
        return
    if not session.fits(cell, sequences=1, tokens=prompt_tokens + 2):
        return
    with session.measuring(cell):
        _mixed_of_fitting(session, cell, batch, context, prompt_tokens, repeats)


def _mixed_of_fitting(
    session: Session, cell: str, batch: int, context: int, prompt_tokens: int, repeats: int
) -> None:
    results = []
    for i in range(repeats + 1):
        session.progress.now(f"{cell}: " + (f"sample {i} of {repeats}" if i else "warm-up"))
        results.append(
            mixed(
                session.engine,
                session.prompts,
                batch=batch,
                context=context,
                prompt_tokens=prompt_tokens,
            )
        )
    gaps = [gap for result in results[1:] for gap in result.gaps_ms]
    session.record(
        "mixed",
        gaps,
        batch=batch,
        context=context,
        prompt_tokens=prompt_tokens,
        max_mixed_tokens=session.setup.config.scheduler.max_mixed_tokens,
        p99=percentile(gaps, 99),
        quiet_ms=round(statistics.median(r.quiet_ms for r in results[1:]), 4),
        prompt_ms=round(statistics.median(r.prompt_ms for r in results[1:]), 3),
    )


def _growth(
    session: Session, *, steps: int, batch: int, prompt_tokens: int, output_tokens: int
) -> None:
    cell = f"growth over {steps} steps of {batch} sequences"
    if not session.fits(cell, sequences=batch, tokens=prompt_tokens + output_tokens):
        return
    with session.measuring(cell):
        session.progress.now(cell)
        _growth_of_fitting(session, steps, batch, prompt_tokens, output_tokens)


def _growth_of_fitting(
    session: Session, steps: int, batch: int, prompt_tokens: int, output_tokens: int
) -> None:
    result = growth(
        session.engine,
        session.prompts,
        steps=steps,
        batch=batch,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )
    grown = result.after.less(result.before)
    session.record(
        "growth",
        result.step_ms,
        steps=steps,
        batch=batch,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests=result.num_requests,
        before=result.before.words(),
        grown=grown.words(),
    )
    session.progress.say(
        f"  grown by {grown.allocated} bytes allocated and {grown.reserved} reserved on the device, {grown.taken} "
        f"taken there by everybody, {grown.resident} resident in this process"
    )


PARTS: dict[str, Callable[..., Part]] = {
    "prefill": prefill_part,
    "decode": decode_part,
    "load": load_part,
    "mixed": mixed_part,
    "growth": growth_part,
}
"""What `rose bench sweep` puts together, by name."""
