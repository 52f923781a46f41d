"""`rose synth`: write a synthetic checkpoint for tests of loading, speed and memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from rose.cli.options import SEED


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--size", default="tiny", show_default=True, help="20b, 120b or tiny.")
@click.option("--layers", type=click.IntRange(min=1), help="Only the first N layers.")
@click.option(
    "--format", "format_name", default="mxfp4", show_default=True, help="mxfp4 or bf16 experts."
)
@click.option("--seed", type=SEED, default=0, show_default=True)
def synth(folder: Path, size: str, layers: int | None, format_name: str, seed: int) -> None:
    """Write a synthetic gpt-oss checkpoint: real names, shapes and shards, made-up numbers."""
    from rose.cli.byte_progress import byte_progress
    from rose.cli.serve import EMBEDDED_MODEL
    from rose.models.gpt_oss.checkpoints import configuration, synthesise
    from rose.weights.folders import gib

    config = configuration(size, num_layers=layers)
    with byte_progress("writing") as progress:
        shards = synthesise(folder, config, seed=seed, format_name=format_name, progress=progress)
    if size == "tiny":  # its vocabulary is no published one
        shutil.copyfile(EMBEDDED_MODEL / "tokenizer.json", folder / "tokenizer.json")
    num_bytes = sum(shard.num_bytes for shard in shards)
    click.echo(
        f"{folder}: gpt-oss {size}, {config.num_layers} layers, {gib(num_bytes)} in {len(shards)} files, seed {seed}"
    )
