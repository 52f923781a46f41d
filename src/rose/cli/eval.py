"""`rose eval`: held-out questions to a model, scored exactly; perplexity; distance to stored log-probabilities."""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from rose.cli.options import Choice, OutputFile, api_key_option, flags_in_errors
from rose.cli.serve import EMBEDDED_MODEL
from rose.config.engine import EngineConfig
from rose.utils.errors import ConfigError

FORMATS = ("auto", "mxfp4", "bf16", "fp8_block", "fp8_block_all")
PROJECTIONS = ("auto", "bf16", "fp8_block")
KV_FORMATS = ("auto", "bf16", "fp8_e4m3")


@click.command()
@click.argument("folder", required=False, metavar="[MODEL]", type=click.Path(path_type=Path))
@click.option(
    "--weights",
    multiple=True,
    type=Choice(FORMATS),
    help="Format of the weights in memory; give it again to compare formats.  [default: auto]",
)
@click.option(
    "--projections",
    multiple=True,
    type=Choice(PROJECTIONS),
    help="Format of projections and head, auto: what --weights says; give it again to compare.  [default: auto]",
)
@click.option(
    "--kv",
    "kvs",
    multiple=True,
    type=Choice(KV_FORMATS),
    help="Format of the KV cache; give it again to compare formats.  [default: auto]",
)
@click.option("--url", help="Ask a running server instead of an engine in this process.")
@api_key_option
@click.option(
    "--task",
    "tasks",
    multiple=True,
    help="Only this task, or texts: the perplexities of fixed texts; may be given again.  [default: all]",
)
@click.option("--count", default=20, show_default=True, type=click.IntRange(1), help="Per task.")
@click.option("--seed", default=2026, show_default=True, help="Other questions, still held out.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--json", "path", type=OutputFile(), help="Write the results here.")
@click.option(
    "--store",
    "is_stored",
    is_flag=True,
    help="Write the float64 reference's log-probabilities into MODEL's folder and stop.",
)
@flags_in_errors(EngineConfig)
def evaluate(
    folder: Path | None,
    weights: tuple[str, ...],
    projections: tuple[str, ...],
    kvs: tuple[str, ...],
    url: str | None,
    tasks: tuple[str, ...],
    path: Path | None,
    is_stored: bool,
    **options: Any,
) -> None:
    """Ask MODEL (the embedded one without it) questions that it was not trained on, greedily, and score the answers.

    Without --task also the perplexities of fixed texts, and how far their log-probabilities are from the stored ones.
    """
    _check(folder, weights + projections + kvs, url, tasks)
    _check_options_count(tasks, url=url, is_stored=is_stored)
    if is_stored:
        from rose.eval.run import store_float64

        click.echo(f"wrote {store_float64(folder or EMBEDDED_MODEL)}")
        return
    formats = list(product(*(given or ("auto",) for given in (weights, projections, kvs))))
    runs = _runs(folder or EMBEDDED_MODEL, formats, url, tasks, **options)
    _print(runs)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**runs[0], "runs": runs}, indent=1) + "\n")


def _check(
    folder: Path | None,
    formats: tuple[str, ...],
    url: str | None,
    tasks: tuple[str, ...],
) -> None:
    from rose.eval.tasks import ASKED, TEXTS

    allowed = (*ASKED, TEXTS)
    problems = [
        f"task {task!r} is not known; allowed: {', '.join(allowed)}; change --task"
        for task in tasks
        if task not in allowed
    ]
    if url is not None and TEXTS in tasks:
        problems.append(
            "--task texts was given with --url; chat answers carry no log-probabilities of texts; leave one of them out"
        )
    if url is not None and (folder is not None or formats):
        problems.append(
            "--url was given with MODEL, --weights, --projections or --kv; a server has chosen its formats; "
            "leave one of them out"
        )
    if problems:
        raise ConfigError(problems)


def _check_options_count(tasks: tuple[str, ...], *, url: str | None, is_stored: bool) -> None:
    """Refuse what would be given for nothing: options of questions where none are asked, of an engine with --url."""
    from rose.eval.tasks import TEXTS

    context = click.get_current_context()
    typed = {
        p.opts[0]
        for p in context.command.params
        if p.name and context.get_parameter_source(p.name) is ParameterSource.COMMANDLINE
    }
    questions = typed & {
        "--weights",
        "--projections",
        "--kv",
        "--url",
        "--task",
        "--count",
        "--seed",
        "--json",
    }
    if is_stored and questions:
        raise ConfigError(
            f"--store asks no questions, and {', '.join(sorted(questions))} would mean nothing; leave one of them out"
        )
    drawn = sorted(typed & {"--count", "--seed"})
    if set(tasks) == {TEXTS} and drawn:
        raise ConfigError(
            f"--task texts asks no questions, and {', '.join(drawn)} would mean nothing; leave one of them out"
        )
    if url is not None and "--device" in typed:
        raise ConfigError(
            "--url was given with --device, which is that of an engine here; leave one of them out"
        )
    if url is None and "--api-key" in typed:
        raise ConfigError(
            "--api-key was given without --url, the server that asks for it; give both or none"
        )


def _runs(
    folder: Path,
    formats: list[tuple[str, ...]],
    url: str | None,
    tasks: tuple[str, ...],
    **options: Any,
) -> list[dict[str, Any]]:
    from rose.config.quant import QuantConfig
    from rose.eval.run import evaluate_folder, evaluate_server, questions
    from rose.eval.tasks import TEXTS

    examples = questions(tasks, options["count"], seed=options["seed"])
    runs = []
    for weights, projections, kv in formats:
        begin = time.perf_counter()
        if url is not None:
            run = evaluate_server(url, examples, api_key=options["api_key"])
        else:
            dense = None if projections == "auto" else projections
            run = evaluate_folder(
                folder,
                QuantConfig(weights=weights, projections=dense, kv=kv),
                examples,
                device=options["device"],
                has_texts=not tasks or TEXTS in tasks,
            )
        run |= {"seed": options["seed"], "seconds": round(time.perf_counter() - begin, 1)}
        runs.append(run)
        click.echo(f"{run['model']}: {len(examples)} questions in {run['seconds']} s", err=True)
    return runs


def _print(runs: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from rose.eval.run import tables

    for title, (head, *rows) in tables(runs).items():
        shown = Table(title=f"{runs[0]['model']}: {title}")
        for i, name in enumerate(head):
            shown.add_column(name, justify="right" if i else "left")
        for row in rows:
            shown.add_row(*row)
        Console().print(shown)
