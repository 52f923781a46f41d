"""What `rose bench` does: build once, measure cells, print a table, append JSON lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rose.bench.build import BenchSetup, build, setup
from rose.bench.record import Origin, append
from rose.bench.sweep import PromptSource, decode_milliseconds, drain, prefill_seconds
from rose.engine.engine import LLMEngine

_console = Console()


class Session:
    """One engine under measurement and where its lines go."""

    def __init__(
        self,
        *,
        size: str,
        weights: str,
        device: str,
        only: dict[str, str],
        layers: int | None,
        kv_tokens: int | None,
        max_step_tokens: int,
        graphs: bool,
        path: Path | None,
        commit: str | None,
        profile: Path | None,
    ) -> None:
        self.setup: BenchSetup = setup(
            size=size,
            weights=weights,
            device=device,
            only=only,
            num_layers=layers,
            kv_tokens=kv_tokens,
            max_step_tokens=max_step_tokens,
            use_graphs=graphs,
        )
        begin = time.perf_counter()
        self.engine: LLMEngine = build(self.setup)
        self.prompts = PromptSource(self.setup.model_config.vocab_size)
        self.origin = Origin.here(config=self.setup.name, commit=commit)
        self.path, self.profile = path, profile
        self.is_trial = layers is not None
        _console.print(
            f"gpt-oss-{size} ready in {time.perf_counter() - begin:.1f} s, {self.setup.name}"
        )
        self.lines: list[dict[str, Any]] = []

    def report(self, bench: str, samples: list[float], **fields: Any) -> None:
        """Print and store one cell."""
        line = self.origin.line(
            bench,
            samples,
            model=self.setup.size,
            kv=self.setup.config.quant.kv,
            **fields,
        )
        if self.is_trial:
            line["option"] = True
        self.lines.append(line)
        append(self.path, line)
        shown = ", ".join(f"{k} {v}" for k, v in fields.items())
        unit = "ms" if bench == "decode" else "s"
        _console.print(f"{bench:8} {shown}: {line['median']:.4f} {unit} (p90 {line['p90']:.4f})")

    def prefill(self, tokens: int, repeats: int) -> None:
        """Measure one prompt length."""
        prefill_seconds(self.engine, self.prompts, tokens)
        with self.traced(f"prefill-{tokens}"):
            samples = [prefill_seconds(self.engine, self.prompts, tokens) for _ in range(repeats)]
        self.report("prefill", samples, tokens=tokens, distinct_experts=self.distinct_experts())

    def decode(self, batch: int, context: int) -> None:
        """Measure one batch size; what does not fit is said and left out."""
        with self.traced(f"decode-{batch}"):
            samples = decode_milliseconds(self.engine, self.prompts, batch, context)
        drain(self.engine)
        self.report(
            "decode",
            samples,
            batch=batch,
            context=context,
            distinct_experts=self.distinct_experts(batch),
        )

    def distinct_experts(self, batch: int | None = None) -> float:
        """Return the mean number of experts hit per layer by random tokens (`batch` of them, or 4096)."""
        from rose.models.gpt_oss.synthetic import mean_distinct_experts

        return round(mean_distinct_experts(self.engine.model, batch or 4096, seed=1), 2)

    @contextmanager
    def traced(self, name: str) -> Iterator[None]:
        """Profile what runs inside, where a folder was given."""
        if self.profile is None:
            yield
            return
        self.profile.mkdir(parents=True, exist_ok=True)
        with torch.profiler.profile() as profiler:
            yield
        table = profiler.key_averages().table(sort_by="cuda_time_total", row_limit=40)
        (self.profile / f"{name}.txt").write_text(table)

    def table(self) -> None:
        """Print all cells."""
        table = Table(title=f"gpt-oss-{self.setup.size} on {self.origin.device}")
        for name in ("cell", "median", "p90", "experts hit"):
            table.add_column(name, justify="right")
        for line in self.lines:
            cell = (
                f"prefill {line['tokens']}"
                if line["bench"] == "prefill"
                else (f"decode {line['batch']} x {line['context']}")
            )
            unit = "s" if line["bench"] == "prefill" else "ms"
            table.add_row(
                cell,
                f"{line['median']:.4f} {unit}",
                f"{line['p90']:.4f}",
                str(line["distinct_experts"]),
            )
        _console.print(table)


def run_prefill(*, tokens: list[int], repeats: int, **options: Any) -> None:
    """Measure prompt lengths."""
    session = Session(**options)
    for number in tokens:
        session.prefill(number, repeats)
    session.table()


def run_decode(*, batches: list[int], context: int, **options: Any) -> None:
    """Measure batch sizes at one context."""
    session = Session(**options)
    for batch in batches:
        session.decode(batch, context)
    session.table()


def run_latency(
    *, tokens: list[int], batches: list[int], context: int, repeats: int, **options: Any
) -> None:
    """Measure both on one engine."""
    session = Session(**options)
    for number in tokens:
        session.prefill(number, repeats)
    for batch in batches:
        session.decode(batch, context)
    session.table()
