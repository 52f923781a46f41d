"""`rose inspect`: what is in a checkpoint, what it needs in memory, what is missing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rose.cli.options import numbers

EXIT_NOT_CLEAN = 1


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--tp",
    "sizes",
    default="1,2,4,8",
    show_default=True,
    callback=numbers,
    help="Numbers of GPUs, with commas.",
)
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def inspect(folder: Path, sizes: list[int], is_json: bool) -> int:
    """Show what checkpoint DIR holds and needs; exit code 1 where tensors are missing, unused or misshapen."""
    report = describe(folder, sizes)
    if is_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    return 0 if report["is_complete"] else EXIT_NOT_CLEAN


def describe(folder: Path, sizes: list[int]) -> dict[str, Any]:
    """Collect everything that is printed; reads headers and config.json only."""
    from rose.runtime.load import find_architecture
    from rose.weights.inspect import contents
    from rose.weights.reader import CheckpointReader

    model = find_architecture(folder).weights
    config = model.read_config(folder)
    with CheckpointReader(folder) as reader:
        layout = model.detect(reader)
        table = model.rules(config, layout)
        held = contents(reader, table)
        at = reader.folder
    return {
        "folder": str(at),
        "architecture": config.architecture,
        "naming": layout.naming,
        "format": layout.format,
        "config": asdict(config),
        "num_files": held.num_files,
        "num_tensors": held.num_tensors,
        "num_parameters": held.num_parameters,
        "num_bytes": held.num_bytes,
        "bytes_by_dtype": held.bytes_by_dtype,
        "is_complete": held.account.is_clean,
        "missing": list(held.account.missing),
        "unused": list(held.account.unused),
        "misshapen": list(held.account.misshapen),
        "problems": held.account.problems(),
        "memory": [_memory(model, config, table, size) for size in sizes],
    }


def _memory(model: Any, config: Any, table: list[Any], size: int) -> dict[str, Any]:
    from rose.cache.layout import CacheLayout
    from rose.config.cache import CacheConfig
    from rose.config.quant import QuantConfig
    from rose.quant.scheme import scheme
    from rose.utils.errors import ConfigError
    from rose.weights.inspect import resident_bytes
    from rose.weights.pieces import Cut

    try:
        model.check_split(config, size)
    except ConfigError as error:
        return {"tp": size, "problem": "; ".join(error.problems)}
    weights = {
        name: resident_bytes(
            table,
            scheme(QuantConfig(weights=name, activations="bf16")).of_role,
            cut=Cut(rank=0, size=size),
        )
        for name in ("mxfp4", "fp8_block", "fp8_block_all", "bf16")
    }
    kinds = CacheLayout.of(config, CacheConfig(), kv_format="bf16", tp=size).kinds
    return {
        "tp": size,
        "weight_bytes": weights,
        "kv_bytes_per_token": sum(
            k.page_bytes // k.page_tokens for k in kinds if k.window_tokens is None
        ),
        # Of a sequence longer than its window, while it decodes.
        "kv_bytes_per_sequence": sum(
            k.page_bytes * k.most_pages(k.window_tokens + k.page_tokens, 1)
            for k in kinds
            if k.window_tokens is not None
        ),
    }


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from rose.weights.folders import gib

    config, console = report["config"], Console(width=110)
    dtypes = ", ".join(f"{name} {gib(size)}" for name, size in report["bytes_by_dtype"].items())
    console.print(
        f"{report['folder']}: {report['architecture']}, {report['naming']} names, {report['format']}\n"
        f"  {report['num_parameters']:,} parameters, {report['num_tensors']} tensors in {report['num_files']} "
        f"files, {gib(report['num_bytes'])} ({dtypes})\n"
        f"  {config['num_layers']} layers, {config['num_experts']} experts, {config['experts_per_token']} per "
        f"token, hidden {config['hidden_size']}, vocabulary {config['vocab_size']}, "
        f"context {config['context_tokens']}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("tp", "mxfp4", "fp8_block", "fp8_block_all", "bf16", "KV/token", "KV/sequence")
    for row in report["memory"]:
        if "problem" in row:
            table.add_row(str(row["tp"]), "cannot be split", *[""] * 5)
            continue
        kv = (row["kv_bytes_per_token"], row["kv_bytes_per_sequence"])
        table.add_row(str(row["tp"]), *map(gib, (*row["weight_bytes"].values(), *kv)))
    table.title = "memory per GPU: weights by format, bf16 KV of full layers and of sliding windows"
    console.print(table)
    for problem in report["problems"]:
        click.echo(f"problem: {problem}")
    click.echo(
        "complete: every tensor is in its place" if report["is_complete"] else "NOT complete"
    )
