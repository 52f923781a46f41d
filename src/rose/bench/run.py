"""What `rose bench` does: build once, measure cells, print a table, append JSON lines."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from rose.bench.load import closed_loop, mixed, mixed_tokens
from rose.bench.progress import BenchProgress
from rose.bench.record import percentile
from rose.bench.session import Session
from rose.bench.sweep import CACHED_REPEATS


def run_latency(
    *,
    tokens: list[int],
    batches: list[int],
    contexts: list[int],
    repeats: int,
    decode_repeats: int = CACHED_REPEATS,
    **options: Any,
) -> int:
    """Measure prompt lengths, then batch sizes at each context, on one engine."""
    with BenchProgress().running() as progress:
        session = Session(progress, **options)
        progress.expect(len(tokens) + len(batches) * len(contexts))
        for number in tokens:
            session.prefill(number, repeats)
        for context in contexts:
            for batch in batches:
                session.decode(batch, context, decode_repeats)
    return session.report()


def run_prefill(*, tokens: list[int], num_prompts: int, repeats: int, **options: Any) -> int:
    """Measure prompt lengths, one prompt at a time or many at once."""
    if num_prompts == 1:
        return run_latency(tokens=tokens, batches=[], contexts=[], repeats=repeats, **options)
    with BenchProgress().running() as progress:
        session = Session(progress, **options)
        progress.expect(len(tokens))
        for number in tokens:
            session.prefill_many(number, num_prompts, repeats)
    return session.report()


def run_load(
    *,
    input_tokens: list[int],
    output_tokens: int,
    in_flight: list[int],
    rounds: int,
    seconds: float | None = None,
    **options: Any,
) -> int:
    """Measure the closed loop at each prompt length and number of requests in flight."""
    with BenchProgress().running() as progress:
        session = Session(progress, **options)
        progress.expect(len(input_tokens) * len(in_flight))
        for length in input_tokens:
            for number in in_flight:
                cell = f"load {length}/{output_tokens}, {number} in flight"
                if session.fits(cell, sequences=number, tokens=length + output_tokens):
                    with session.measuring(cell):
                        session.progress.now(cell)
                        _load(session, number, length, output_tokens, rounds, seconds)
    return session.report()


def _load(
    session: Session,
    in_flight: int,
    input_tokens: int,
    output_tokens: int,
    rounds: int,
    seconds: float | None,
) -> None:
    device, steps = session.engine.model.device, session.engine.counters.num_steps
    held = _held_bytes(device)
    result = closed_loop(
        session.engine,
        session.prompts,
        in_flight=in_flight,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        requests=in_flight * rounds,
        seconds=seconds,
        is_filled=session.is_filled,
        now=session.progress.now if session.progress.is_moving else lambda _text: None,
    )
    first, token = result.first_token_ms, result.token_ms
    timed = "whole requests" if seconds is None else f"what was seen, {seconds:g} s at most"
    session.record(
        "load",
        token,
        timed=timed + ", first prompts made up" * session.is_filled,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        in_flight=in_flight,
        requests=result.num_requests,
        steps=session.engine.counters.num_steps - steps,
        memory_growth_bytes=_held_bytes(device) - held,
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


def run_mixed(*, batch: int, context: int, prompt_tokens: int, repeats: int, **options: Any) -> int:
    """Measure the token gaps of decoding sequences while a long prompt enters."""
    with BenchProgress().running() as progress:
        session = Session(progress, **options)
        progress.expect(1)
        cell = f"mixed {batch} x {context} with a prompt of {prompt_tokens}"
        # The prompt takes pages beside the others: counted as if all had the room of the longest.
        longest = mixed_tokens(session.engine, batch, context, prompt_tokens)
        if session.fits(cell, sequences=batch + 1, tokens=max(longest, context)) and session.fits(
            cell, sequences=1, tokens=prompt_tokens + 2
        ):
            with session.measuring(cell):
                _mixed(session, cell, batch, context, prompt_tokens, repeats)
    return session.report()


def _mixed(
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
