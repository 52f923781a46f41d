"""`rose bench`: latency of prefill and decode through the engine, on synthetic weights of the real shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


def _numbers(_context: click.Context, _parameter: click.Parameter, value: str) -> list[int]:
    try:
        numbers = [int(v) for v in value.split(",") if v]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(
            f"{value!r}; allowed: whole numbers of at least 1, with commas between"
        )
    return numbers


def _pairs(
    _context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]
) -> dict[str, str]:
    for item in value:
        if "=" not in item:
            raise click.BadParameter(f"{item!r}; allowed: operation=implementation")
    return dict(item.split("=", 1) for item in value)


def _shared(command: Any) -> Any:
    options = (
        click.option("--size", type=click.Choice(["20b", "120b", "tiny"]), default="tiny", show_default=True,
                     help="Shape of the model."),
        click.option("--weights", default="mxfp4", show_default=True, help="Resident weight format."),
        click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
        click.option("--only", multiple=True, callback=_pairs, metavar="OP=NAME",
                     help="Use one implementation of an operation."),
        click.option("--layers", type=int, help="Keep only the first layers (not a result, a trial)."),
        click.option("--kv-tokens", type=int, help="Tokens of KV to hold; default: what memory leaves."),
        click.option("--max-step-tokens", type=int, default=16384, show_default=True,
                     help="New tokens of all sequences in one step."),
        click.option("--graphs/--no-graphs", default=True, help="Replay decode steps from CUDA graphs."),
        click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False),
                     help="Append JSON lines to this file."),
        click.option("--commit", help="Commit of the tree, where it travels without its repository."),
        click.option("--profile", type=click.Path(path_type=Path, file_okay=False),
                     help="Write a profiler trace and a table per kernel to this folder."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def bench() -> None:
    """Measure this machine; every line tells how to repeat it."""


@bench.command()
@_shared
@click.option(
    "--tokens", default="8192", show_default=True, callback=_numbers, help="Prompt lengths."
)
@click.option(
    "--repeats", default=3, show_default=True, help="Samples per length, after one warm-up."
)
def prefill(tokens: list[int], repeats: int, **options: Any) -> None:
    """Time from submission of an unseen prompt to its first token."""
    from rose.bench.run import run_prefill

    run_prefill(tokens=tokens, repeats=repeats, **options)


@bench.command()
@_shared
@click.option(
    "--batches", default="1,8", show_default=True, callback=_numbers, help="Sequences that decode."
)
@click.option("--context", default=8192, show_default=True, help="Tokens of each prompt.")
def decode(batches: list[int], context: int, **options: Any) -> None:
    """Time per step with the whole batch decoding at temperature 1."""
    from rose.bench.run import run_decode

    run_decode(batches=batches, context=context, **options)


@bench.command()
@_shared
@click.option("--tokens", default="8192,32768,65536,128000", show_default=True, callback=_numbers)
@click.option("--batches", default="1,8,32,128", show_default=True, callback=_numbers)
@click.option("--context", default=8192, show_default=True)
@click.option("--repeats", default=3, show_default=True)
def latency(
    tokens: list[int], batches: list[int], context: int, repeats: int, **options: Any
) -> None:
    """Run prefill and decode on one engine: the cells of the score table, one resident set of weights."""
    from rose.bench.run import run_latency

    run_latency(tokens=tokens, batches=batches, context=context, repeats=repeats, **options)
