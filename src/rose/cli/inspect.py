"""`rose inspect`: what is in a checkpoint, what it needs in memory, what is missing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rose.cli.options import Choice, given_values, numbers, tree_options
from rose.config import cli as config_cli
from rose.config.cli import build
from rose.config.engine import EngineConfig
from rose.utils.device import DeviceFacts

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
@click.option(
    "--plan-for",
    type=Choice(["here", "h200"]),
    default="here",
    show_default=True,
    help="Device whose memory is planned: this machine's (see --device), or an H200.",
)
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
@tree_options(EngineConfig, skip=frozenset({"model", "parallel.tp"}))
def inspect(folder: Path, sizes: list[int], plan_for: str, is_json: bool, **arguments: Any) -> int:
    """Show what checkpoint DIR holds and needs; exit code 1 where tensors are missing, unused or misshapen, or where
    the memory plan is refused.

    The options of the engine change the memory plan, which is the one that `rose serve` makes before it loads.
    """
    values = {**given_values(EngineConfig, arguments), ("model",): str(folder)}
    config = build(EngineConfig, values)
    report = describe(folder, sizes)
    report["plan"] = plan(config, report["format"], plan_for)
    if is_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    is_good = report["is_complete"] and "refused" not in report["plan"]
    return 0 if is_good else EXIT_NOT_CLEAN


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


def plan(config: EngineConfig, checkpoint_format: str, plan_for: str) -> dict[str, Any]:
    """Make the plan that serving would make: its lines, or why it is refused."""
    from rose.runtime.before_load import Planner
    from rose.runtime.load import find_architecture
    from rose.utils.device import H200, detect, free_bytes
    from rose.utils.errors import ConfigError

    folder = Path(config.model)
    entry = find_architecture(folder)
    device = H200 if plan_for == "h200" else detect(config.device)
    planner = Planner(
        entry=entry,
        model_config=entry.weights.read_config(folder),
        device=device,
        free_bytes=None if plan_for == "h200" else free_bytes(device),
        asked=config.scheduler,
    )
    resolved = config.resolve(device, checkpoint_format=checkpoint_format)
    try:
        made = planner.plan(resolved)
    except ConfigError as error:
        return {"device": device.name, "notes": notes(device), "refused": str(error)}
    return {
        "device": device.name,
        "notes": notes(device),
        "lines": planner.lines(resolved, made),
        "bytes": {**asdict(made.use), "kv": made.kv_bytes, "total": made.total},
        "num_pages": made.num_pages,
        "kv_tokens": made.kv_tokens,
    }


def notes(device: DeviceFacts) -> list[str]:
    """Say where what is installed here makes a plan larger than that of a machine which serves on this device."""
    from rose.kernels import registry

    lacking = [
        name
        for name in registry.operation_names()
        if any("triton" in why for _, why in registry.left_out(name))
    ]
    if device.kind != "cuda" or not lacking:
        return []
    return [
        f"triton is not installed here, so {', '.join(lacking)} are planned with what is left: attention falls back to "
        "torch, whose workspace is larger; where triton is installed the plan needs less; install it to see that plan"
    ]


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
    kinds = CacheLayout.of(config, CacheConfig(), kv_element="bf16", tp=size).kinds
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
    _print_plan(report["plan"])


def _print_plan(made: dict[str, Any]) -> None:
    """The verdict comes last, where it is looked for."""
    for note in made["notes"]:
        click.echo(f"note: {note}")
    if "refused" in made:
        text = config_cli.with_flags(made["refused"], config_cli.options(EngineConfig))
        click.echo(f"memory plan refused: {text}")
        return
    click.echo("memory plan, with the kernels that can be bound on this machine:")
    for line in made["lines"]:
        click.echo(f"  {line}")
    click.echo(f"the plan fits on {made['device']}")
