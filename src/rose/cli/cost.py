"""`rose cost`: what a million tokens cost, from result files or from a latency."""

from __future__ import annotations

from pathlib import Path

import click

from rose.cli.options import Number

PRICE = 3.0


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option("--seconds", type=Number(min=0, min_open=True), help="Time that the tokens took.")
@click.option("--tokens", type=Number(min=0, min_open=True), help="Tokens made in that time.")
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--price", type=Number(min=0), default=PRICE, show_default=True,
              help="US dollars per GPU and hour.")  # fmt: skip
def cost(
    files: tuple[Path, ...], seconds: float | None, tokens: float | None, gpus: int, price: float
) -> None:
    """Latency x GPUs x price / tokens: of the newest line of each cell in FILES, or of one latency.

    \b
    rose cost --seconds 0.118 --tokens 8192            input tokens of a prefill
    rose cost --seconds 0.0155 --tokens 128            output tokens of a decode step of 128 sequences
    rose cost benchmarks/results/*.jsonl
    """
    from rose.bench.cost import usd_per_million

    if (seconds is None) != (tokens is None):
        missing = "--tokens" if tokens is None else "--seconds"
        raise click.UsageError(f"{missing} is missing; give both --seconds and --tokens")
    if seconds is not None and tokens is not None:
        if files:
            raise click.UsageError("files and --seconds were given; give one of them")
        dollars = usd_per_million(seconds=seconds, tokens=tokens, gpus=gpus, price=price)
        click.echo(f"{dollars:.4f} USD per million tokens")
        return
    if not files:
        raise click.UsageError("nothing to price; give result files, or --seconds and --tokens")
    if gpus != 1:
        raise click.UsageError("--gpus belongs to --seconds; lines of result files say their own")
    _of_files(files, price)


def _of_files(files: tuple[Path, ...], price: float) -> None:
    from rose.bench.cost import PRICED_DEVICE, is_priced, line_cost
    from rose.bench.report import line_words
    from rose.bench.results import read

    results = read(files)
    lines = [*results.cells.values(), *results.options]
    rows = [(line_words(line), line) for line in lines]
    for line in results.others.get("load", []):
        name = "load {input_tokens}/{output_tokens}, {in_flight} in flight".format(**line)
        rows.append((name, line))
    for name, line in rows:
        made = line_cost(line, price=price)
        if made is not None:
            kind, dollars = made
            click.echo(
                f"{line['model']:>5}  {name:40} {dollars:9.4f} USD per million {kind} tokens"
            )
        elif not is_priced(line):
            click.echo(
                f"not priced: {line['model']} {name}: device {line.get('device')!r} is no {PRICED_DEVICE}",
                err=True,
            )
    for text in results.refused:
        click.echo(f"not taken: {text}", err=True)
