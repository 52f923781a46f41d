"""One evaluation: ask, score, compare, and lay the results of several formats side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rose.config.quant import QuantConfig
from rose.eval.asking import EngineAsker, HttpAsker
from rose.eval.examples import Example
from rose.eval.scoring import summary
from rose.eval.tasks import ASKED, TEXTS, held_out_set

SEED = 2026
"""Of the questions asked."""


def questions(tasks: Sequence[str], count: int, *, seed: int = SEED) -> list[Example]:
    """Return `count` held-out questions of each task but `TEXTS`; of all where none is named."""
    asked = [task for task in tasks or ASKED if task != TEXTS]
    return [example for task in asked for example in held_out_set(task, count, seed=seed)]


def evaluate_server(
    url: str, examples: Sequence[Example], *, api_key: str | None = None
) -> dict[str, Any]:
    """Ask a server; log-probabilities are not compared, since chat answers carry none."""
    asker = HttpAsker(url, api_key=api_key)
    replies = asker.ask(examples)
    return {"model": asker.model, "url": url, **summary(zip(examples, replies, strict=True))}


def evaluate_folder(
    folder: Path, quant: QuantConfig, examples: Sequence[Example], *, device: str, has_texts: bool
) -> dict[str, Any]:
    """Ask the engine on the weights of a folder, in these formats; `has_texts`: compare the fixed texts too."""
    from rose.eval.logprobs import compare

    asker = EngineAsker(folder, quant=quant, device=device)
    replies = asker.ask(examples)
    model = asker.engine.model
    return {
        "model": folder.name,
        "weights": quant.weights,
        "projections": quant.projections,
        "device": str(model.device),
        "activations": asker.quant.activations,
        "kv": asker.quant.kv,
        **summary(zip(examples, replies, strict=True)),
        "texts": compare(folder, model, asker.tokenizer) if has_texts else {},
    }


def store_float64(folder: Path) -> Path:
    """Write the log-probabilities of the float64 reference into the folder."""
    import torch

    from rose.eval.logprobs import store
    from rose.frontend.tokenizer import load_tokenizer
    from rose.models.gpt_oss.original import reference_config, weights_of
    from rose.models.gpt_oss.weights import checkpoint_format, load, read_config

    config = read_config(folder)
    quant = QuantConfig(weights=checkpoint_format(folder), activations="float64", kv="float64")
    parameters = load(folder, config, quant)
    weights = weights_of(parameters, torch.float64)
    return store(folder, reference_config(config), weights, load_tokenizer(folder))


def tables(runs: Sequence[dict[str, Any]]) -> dict[str, list[list[str]]]:
    """Return rows of cells by what they are of; one column per run, and for further runs the difference to the first.

    Shares are in percent, their differences in points. The first row of each is its head; none without rows is there.
    """
    found = {
        "answers right, percent": ("task", _shares(runs)),
        "reasoning, characters on average": ("effort", _lengths(runs)),
        "fixed texts": ("measure", _texts(runs)),
    }
    return {title: [_head(what, runs), *rows] for title, (what, rows) in found.items() if rows}


def _head(what: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    names = [_name(run) for run in runs]
    head = [what, names[0]]
    for name in names[1:]:
        head += [name, f"{name} - {names[0]}"]
    return head


def _shares(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for task in runs[0]["tasks"]:
        shares = [100 * run["tasks"][task] for run in runs]
        rows.append([task, *_cells(shares, "{:.1f}", "{:+.1f}")])
    return rows


def _lengths(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for effort in runs[0]["reasoning_characters"]:
        lengths = [run["reasoning_characters"].get(effort, 0.0) for run in runs]
        rows.append([effort, *_cells(lengths, "{:.0f}", "{:+.0f}")])
    return rows


def _texts(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for text, line in runs[0].get("texts", {}).items():
        for what in ("perplexity", "mean_difference"):
            if what in line:
                values = [run["texts"][text][what] for run in runs]
                label = what if what == "perplexity" else "|log p - float64|"
                rows.append([f"{label}, {text}", *_cells(values, "{:.4g}", "{:+.2g}")])
    return rows


def _name(run: dict[str, Any]) -> str:
    words = [run.get("weights", "served")]
    if run.get("projections") is not None:
        words.append(f"projections {run['projections']}")
    if run.get("kv") != run.get("activations"):
        words.append(f"KV {run['kv']}")
    return ", ".join(words)


def _cells(values: Sequence[float], plain: str, signed: str) -> list[str]:
    cells = [plain.format(values[0])]
    for value in values[1:]:
        cells += [plain.format(value), signed.format(value - values[0])]
    return cells
