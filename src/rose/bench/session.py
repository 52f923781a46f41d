"""One engine under measurement: built once, its cells measured one by one, its lines printed and kept."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rose.bench.build import BenchSetup, build, setup
from rose.bench.fit import CellError, refusal
from rose.bench.profile import traced
from rose.bench.progress import BenchProgress
from rose.bench.record import Origin, append
from rose.bench.sweep import (
    CACHED_REPEATS,
    PromptSource,
    cached_decode_milliseconds,
    decode_milliseconds,
    decode_tokens,
    drain,
    prefill_many_seconds,
    prefill_seconds,
    randomise_kv,
)
from rose.engine.engine import LLMEngine

PROFILED_STEPS = 8
"""Enough for a table; torch's profiler takes a second for each step of a thousand operators."""
UNITS = {
    "prefill": "s",
    "start": "s",
    "decode": "ms",
    "decode_filled": "ms",
    "load": "ms",
    "mixed": "ms",
    "prefill_many": "s",
    "growth": "ms",
}


class Session:
    """One engine, where its lines go, and what was left out."""

    def __init__(
        self,
        progress: BenchProgress,
        *,
        path: Path | None = None,
        commit: str | None = None,
        profile: Path | None = None,
        until: float | None = None,
        **choices: Any,
    ) -> None:
        """`choices`: arguments of `setup`; `until`: seconds from here after which no cell begins."""
        self.progress = progress
        self._begin, self.until = time.perf_counter(), until
        self.setup: BenchSetup = setup(**choices)
        begin = time.perf_counter()
        self.engine: LLMEngine = build(self.setup, progress.now)
        seconds = time.perf_counter() - begin
        progress.say(
            f"gpt-oss-{self.setup.size} built in {seconds:.1f} s on {self.setup.device.name}, {self.setup.name}"
        )
        self.prompts = PromptSource(self.setup.model_config.vocab_size)
        self.origin = Origin.here(
            device=self.setup.device.name, config=self.setup.name, commit=commit
        )
        self.path, self.profile = path, profile
        self.lines: list[dict[str, Any]] = []
        self.left_out: list[tuple[str, str]] = []
        self.failed: list[tuple[str, str]] = []
        self.distinct_experts = cache(self._distinct_experts)
        self.make_up_kv = cache(self._make_up_kv)

    def _make_up_kv(self) -> None:
        """Write random numbers into the KV cache, once, for prompts that enter it without being computed."""
        self.progress.now("filling the KV cache with random numbers")
        drain(self.engine)
        randomise_kv(self.engine)

    def fits(self, cell: str, *, sequences: int, tokens: int) -> bool:
        """Whether a cell can run; one that cannot is said and left out, one that comes too late has failed."""
        why = refusal(self.engine, sequences=sequences, tokens=tokens)
        if why is not None:
            self.left_out.append((cell, why))
            self.progress.done(f"{cell}: left out: {why}")
            return False
        seconds = time.perf_counter() - self._begin
        if self.until is not None and seconds > self.until:
            self.fail(
                cell, f"{seconds:.0f} s had passed, none begins after {self.until:g} (--until)"
            )
            return False
        return True

    @contextmanager
    def measuring(self, cell: str) -> Iterator[None]:
        """Run one cell inside the block; one that gives no figure is said, and leaves the engine empty for others."""
        try:
            yield
        except CellError as error:
            for request_id in self.engine.running_ids():
                self.engine.abort(request_id)
            drain(self.engine)
            self.fail(cell, str(error))

    def fail(self, cell: str, why: str) -> None:
        """Say and keep that a cell, or several, gave no figure: the run is no pass."""
        self.failed.append((cell, why))
        self.progress.done(f"{cell}: failed: {why}")

    def record(self, bench: str, samples: list[float], **fields: Any) -> dict[str, Any]:
        """Print and store one cell."""
        line = self.origin.line(
            bench, samples, model=self.setup.size, kv=self.setup.config.quant.kv, **fields
        )
        if self.setup.is_option:
            line["option"] = True
        self.lines.append(line)
        append(self.path, line)
        self.progress.done(
            f"{cell_name(line)}: {line['median']:.4f} {UNITS[bench]} (p90 {line['p90']:.4f})"
        )
        return line

    def prefill(self, tokens: int, repeats: int) -> None:
        """Measure one prompt length."""
        cell = f"prefill {tokens}"
        if not self.fits(cell, sequences=1, tokens=tokens + 1):
            return
        with self.measuring(cell):
            self._prefill(cell, tokens, repeats)

    def _prefill(self, cell: str, tokens: int, repeats: int) -> None:
        self.progress.now(f"{cell}: warm-up")
        prefill_seconds(self.engine, self.prompts, tokens)
        samples = []
        for i in range(repeats):
            self.progress.now(f"{cell}: sample {i + 1} of {repeats}")
            samples.append(prefill_seconds(self.engine, self.prompts, tokens))
        if self.profile is not None:
            self.progress.now(f"{cell}: profile")
            with traced(self.profile, f"prefill-{tokens}"):
                prefill_seconds(self.engine, self.prompts, tokens)
        self.record("prefill", samples, tokens=tokens, distinct_experts=self.distinct_experts(256))

    def prefill_many(self, tokens: int, num_prompts: int, repeats: int) -> None:
        """Measure many prompts of one length given at once; the cache need not hold them all together."""
        cell = f"prefill {num_prompts} prompts of {tokens}"
        if not self.fits(cell, sequences=1, tokens=tokens + 1):
            return
        with self.measuring(cell):
            self._prefill_many(cell, tokens, num_prompts, repeats)

    def _prefill_many(self, cell: str, tokens: int, num_prompts: int, repeats: int) -> None:
        samples = []
        for i in range(repeats):
            self.progress.now(f"{cell}: sample {i + 1} of {repeats}")
            samples.append(prefill_many_seconds(self.engine, self.prompts, tokens, num_prompts))
            drain(self.engine)
        self.record(
            "prefill_many",
            samples,
            prompts=num_prompts,
            tokens=tokens,
            tokens_per_s=round(num_prompts * tokens / statistics.median(samples), 1),
        )

    def decode(
        self,
        batch: int,
        context: int,
        repeats: int = CACHED_REPEATS,
        *,
        is_filled: bool = False,
    ) -> None:
        """Measure one batch size at one context.

        Units  repeats: differences taken with the prefix cache on; is_filled: prompts enter it without being computed
        """
        cell = f"decode {batch} x {context}"
        tokens = decode_tokens(self.engine, batch, context)
        if not self.fits(cell, sequences=batch, tokens=tokens):
            return
        with self.measuring(cell):
            if is_filled:
                self.make_up_kv()
            self._decode(cell, batch, context, repeats, is_filled=is_filled)

    def _decode(
        self, cell: str, batch: int, context: int, repeats: int, *, is_filled: bool
    ) -> None:
        self.progress.now(cell)
        is_cached = self.engine.table.is_caching
        timed = "96 steps after prefill"
        if is_cached:
            timed = "(t97 - t1) / 96, prompts cached" + ", KV made up" * is_filled
            samples = cached_decode_milliseconds(
                self.engine, self.prompts, batch, context,
                repeats=repeats, is_filled=is_filled,
            )  # fmt: skip
        else:
            samples = decode_milliseconds(self.engine, self.prompts, batch, context)
        if self.profile is not None:
            self.progress.now(f"{cell}: profile")
            trace: AbstractContextManager[None] = traced(self.profile, f"decode-{batch}x{context}")
            decode_milliseconds(
                self.engine, self.prompts, batch, context, steps=PROFILED_STEPS, trace=trace
            )
        experts = self.distinct_experts(batch)
        # Made-up KV is no cell of the score table: a line of its own kind cannot take the place of one.
        self.record(
            "decode_filled" if is_filled else "decode",
            samples,
            batch=batch,
            context=context,
            timed=timed,
            in_order=[round(sample, 4) for sample in samples],
            distinct_experts=experts,
        )

    def _distinct_experts(self, tokens: int) -> float:
        """Return the mean number of experts that so many random tokens, each of its own sequence, hit in a layer."""
        from rose.models.gpt_oss.synthetic import mean_distinct_experts

        self.progress.now(f"counting the experts that {tokens} tokens hit")
        return round(mean_distinct_experts(self.engine.model, tokens, seed=1), 2)

    def report(self) -> int:
        """Print all cells, what was left out and what failed; return the exit code: 1 where a cell failed."""
        console = Console()
        table = Table(title=f"gpt-oss-{self.setup.size} on {self.origin.device}")
        table.add_column("cell")
        for name in ("median", "p90", "experts hit"):
            table.add_column(name, justify="right")
        for line in self.lines:
            table.add_row(
                cell_name(line),
                f"{line['median']:.4f} {UNITS[line['bench']]}",
                f"{line['p90']:.4f}",
                str(line.get("distinct_experts", "")),
            )
        console.print(table)
        for cell, why in self.left_out:
            console.print(f"left out: {cell}: {why}", markup=False)
        for cell, why in self.failed:
            console.print(f"failed: {cell}: {why}", markup=False)
        return 1 if self.failed else 0


def cell_name(line: dict[str, Any]) -> str:
    """Return what a line measured, in words."""
    return {
        "prefill": "prefill {tokens}",
        "prefill_many": "prefill {prompts} prompts of {tokens}",
        "decode": "decode {batch} x {context}",
        "decode_filled": "decode {batch} x {context}, KV made up",
        "load": "load {input_tokens}/{output_tokens}, {in_flight} in flight, per token",
        "mixed": "mixed {batch} x {context} with a prompt of {prompt_tokens}, token gap",
        "growth": "{steps} steps of {batch} sequences, a step",
        "start": "start, cached {cached}",
    }[line["bench"]].format(**line)
