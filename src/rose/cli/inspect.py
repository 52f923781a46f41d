"""`rose inspect`: what is in a checkpoint, what it needs in memory, what is missing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

EXIT_NOT_CLEAN = 1
PAGE_TOKENS = 64


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--tp", "sizes", default="1,2,4,8", show_default=True, help="Numbers of GPUs, with commas."
)
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def inspect(folder: Path, sizes: str, is_json: bool) -> int:
    """Show what checkpoint DIR holds and needs; exit code 1 where tensors are missing, unused or misshapen."""
    report = describe(folder, _numbers(sizes))
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
    from rose.config.quant import QuantConfig
    from rose.quant.scheme import scheme
    from rose.utils.errors import ConfigError
    from rose.weights.inspect import kv_need, resident_bytes
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
    kv = kv_need(config, size=size, bytes_per_element=2, page_tokens=PAGE_TOKENS)
    return {
        "tp": size,
        "weight_bytes": weights,
        "kv_bytes_per_token": kv.per_token,
        "kv_bytes_per_sequence": kv.per_sequence,
    }


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a list of whole numbers like 1,2,4", param_hint="--tp"
        ) from None


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
