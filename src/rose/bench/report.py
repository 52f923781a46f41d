"""Markdown of result files: the score table beside seed, peer, goal and floor, then everything else measured.

Reads JSON lines only; measures nothing and needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rose.bench.cost import PRICE, is_priced, line_cost
from rose.bench.ratios import ratios
from rose.bench.results import Line, Results
from rose.bench.targets import FIELDS, Cell, Targets

MAX_REFUSED = 20
ERRORS = {
    "pytorch_bf16": "PyTorch bf16",
    "reference_rounded": "rounded reference",
    "prefill": "prefill",
    "prefill_against_rounded": "prefill against rounded",
    "decode_after_prefill": "decode",
}
"""Names in accuracy lines, and in the table."""


def markdown(
    results: Results,
    targets: Targets,
    *,
    charts: Sequence[tuple[str, str]] = (),
    price: float = PRICE,
) -> str:
    """Return the whole report; `charts` are (caption, link) pairs."""
    blocks = ["# Results", _intro(targets), _exactness(results, targets)]
    blocks += [f"![{caption}]({link})" for caption, link in charts]
    models = list(dict.fromkeys(cell.model for cell in targets.cells.values()))
    for model in models:
        blocks += [f"## gpt-oss-{model}", score_table(results, targets, model)]
        blocks += _configurations(results, targets, model)
    blocks.append(summary(results, targets))
    blocks += _more_cells(results, targets, price)
    blocks += _load(results, price)
    blocks += _many(results, targets)
    blocks += _mixed(results)
    blocks += _growth(results)
    blocks += _options(results, price)
    blocks += _accuracy(results)
    blocks += _kernels(results)
    if results.refused:
        shown = results.refused[:MAX_REFUSED]
        more = len(results.refused) - len(shown)
        lines = [f"- {r}" for r in shown] + ([f"- and {more} more"] if more else [])
        blocks += ["## Lines not taken", "\n".join(lines)]
    return "\n\n".join(blocks) + "\n"


def _intro(targets: Targets) -> str:
    sources = [f"- **{name}**: {text}" for name, text in targets.sources.items()]
    return "\n".join(
        [
            f"Figures of others are of {targets.machine}. Ratios above 1 are in our favour "
            "(peer / ours, seed / ours); floor / ours is the share of the limit that is reached.",
            "",
            *sources,
        ]
    )


def _exactness(results: Results, targets: Targets) -> str:
    """Return what the figures cost in exactness, from the accuracy lines of the models in the tables."""
    models = {cell.model for cell in targets.cells.values()}
    lines = [x for x in results.others.get("accuracy", []) if x["model"] in models]
    measured = "; ".join(map(_error_ratios, lines)) or "to be measured"
    return (
        "How exact the figures are: in prefill the inputs of the experts are rounded to E4M3, and their weights are "
        "exact within its range; in decode the inputs are bf16. The peer multiplies bf16 by MXFP4 in both. Error of "
        f"the logits against float32, over that of a bf16 model in PyTorch: {measured}."
    )


def _error_ratios(line: Line) -> str:
    errors = line["relative_error_of_logits"]
    prefill = errors["prefill"] / errors["pytorch_bf16"]
    decode = errors["decode_after_prefill"] / errors["pytorch_bf16_last_tokens"]
    rounded = ratios(errors)["prefill"]
    return (
        f"{line['model']} ({line['layers']} layers, random weights) prefill {prefill:.2f}, or {rounded:.2f} where "
        f"float32 rounds the same inputs, decode {decode:.2f}"
    )


def score_table(results: Results, targets: Targets, model: str) -> str:
    """Return the table of one model's cells."""
    rows = []
    for key, cell in targets.cells.items():
        if cell.model != model:
            continue
        ours = results.cells.get(key, {}).get("median")
        rows.append(
            [
                f"{cell_words(cell)}, {cell.unit}",
                *(_figure(x) for x in (cell.seed, cell.peer, cell.must, cell.goal, cell.floor)),
                f"**{_figure(ours)}**" if ours is not None else "-",
                *(_ratio(x, ours) for x in (cell.seed, cell.peer, cell.floor)),
                verdict(cell, ours),
            ]
        )
    heads = ["cell", "seed", "peer", "must", "goal", "floor", "ours"]
    return table([*heads, "seed / ours", "peer / ours", "floor / ours", "reached"], rows)


def verdict(cell: Cell, ours: float | None) -> str:
    """Return how far a cell has come."""
    if ours is None:
        return "not measured"
    if cell.goal is not None and ours <= cell.goal:
        return "goal"
    return "must" if ours <= cell.must else f"short by {ours / cell.must - 1:.0%}"


def num_short(results: Results, targets: Targets) -> int:
    """Return how many cells miss their must, those not measured included."""
    medians = {k: results.cells.get(k, {}).get("median") for k in targets.cells}
    return sum(m is None or m > targets.cells[k].must for k, m in medians.items())


def mixed_models(results: Results, targets: Targets) -> list[str]:
    """Return the models whose counted cells come from more than one serving configuration."""
    configs: dict[str, set[str]] = {}
    for key, line in results.cells.items():
        if key in targets.cells:
            configs.setdefault(key[1], set()).add(line["config"])
    return [model for model, found in configs.items() if len(found) > 1]


def summary(results: Results, targets: Targets) -> str:
    """Return the last word on the score table."""
    short = num_short(results, targets)
    words = [
        f"{len(targets.cells) - short} of {len(targets.cells)} cells reach their must, {short} are short; "
        f"{len(results.refused)} lines were not taken, {results.num_aside} left aside."
    ]
    words += [
        f"The cells of {model} come from more than one configuration; one server must reach all of them."
        for model in mixed_models(results, targets)
    ]
    return " ".join(words)


def _configurations(results: Results, targets: Targets, model: str) -> list[str]:
    lines = [results.cells[k] for k in targets.cells if k[1] == model and k in results.cells]
    if not lines:
        return []
    parts = []
    for name, title in (("config", "Configuration"), ("device", "Device"), ("commit", "Commit")):
        parts.append(f"{title}: " + ", ".join(dict.fromkeys(f"`{x[name]}`" for x in lines)))
    experts = [x["distinct_experts"] for x in lines if x["bench"] == "prefill"]
    if experts:
        parts.append(f"Experts hit per layer by 256 sequences: {experts[0]:g}")
    # Where a run put its lines says nothing about how to repeat it.
    said = (re.sub(r" --json \S+", " --json FILE", x["command"]) for x in lines)
    commands = "\n".join(f"- `{c}`" for c in dict.fromkeys(said))
    return [". ".join(parts) + ".", f"Measured by\n\n{commands}"]


def _more_cells(results: Results, targets: Targets, price: float) -> list[str]:
    lines = [line for key, line in results.cells.items() if key not in targets.cells]
    return ["## More lengths and batches", _cost_table(lines, price)] if lines else []


def _options(results: Results, price: float) -> list[str]:
    if not results.options:
        return []
    text = "Measured, and left out of the table above: other formats, trials, other machines' settings."
    return ["## Options", text, _cost_table(results.options, price)]


def _cost_table(lines: Iterable[Line], price: float) -> str:
    rows = []
    for line in sorted(lines, key=_order):
        made = line_cost(line, price=price)
        rows.append(
            [
                line["model"],
                line_words(line),
                f"{_figure(line['median'])} {'ms' if line['bench'].startswith('decode') else 's'}",
                f"{made[1]:.3f} per M {made[0]} tokens" if made else "-",
                _figure(line.get("distinct_experts")),
                f"`{line.get('config', '-')}`",
                _commit(line),
            ]
        )
    heads = ["model", "cell", "median", f"USD at {price:g}/h", "experts hit", "configuration"]
    return table([*heads, "commit"], rows)


def _commit(line: Line) -> str:
    """Return the commit that a line was measured at; rows of one table may be of several."""
    return f"`{line['commit']}`" if "commit" in line else "-"


def _order(line: Line) -> tuple[Any, ...]:
    numbers = tuple(line.get(k) or 0 for k in ("context", "batch", "tokens"))
    return (line["bench"] != "prefill", str(line["model"]), line["bench"], *numbers)


def _load(results: Results, price: float) -> list[str]:
    lines = results.others.get("load", [])
    if not lines:
        return []
    rows = []
    for x in sorted(lines, key=lambda x: (x["model"], x["input_tokens"], x["in_flight"])):
        made = line_cost(x, price=price)
        rows.append(
            [
                x["model"],
                x["device"],
                f"{x['input_tokens']} / {x['output_tokens']}",
                str(x["in_flight"]),
                f"{x['output_tokens_per_s']:.0f}",
                f"{x['first_token_ms']:.0f} ({x['first_token_ms_p99']:.0f})",
                f"{x['token_ms']:.2f} ({x['token_ms_p99']:.2f})",
                f"{made[1]:.3f}" if made else "-",
                x["timed"],
                _commit(x),
            ]
        )
    heads = [
        "model",
        "device",
        "tokens in / out",
        "in flight",
        "output tokens/s",
        "first token, ms (p99)",
    ]
    heads += ["per token, ms (p99)", f"USD per M output at {price:g}/h", "timed", "commit"]
    return ["## Closed loop", table(heads, rows)]


def _many(results: Results, targets: Targets) -> list[str]:
    lines = results.others.get("prefill_many", [])
    peers = {
        (p["model"], p["prompts"], p["tokens"]): p["peer_tokens_per_s"]
        for p in targets.prefill_many
    }
    rows = []
    for x in lines:
        peer = peers.get((x["model"], x["prompts"], x["tokens"]))
        ours = x["tokens_per_s"]
        ratio = f"{ours / peer:.2f}" if peer else "-"
        cell = f"{x['prompts']} x {x['tokens']}"
        figures = [f"{ours:.0f}", f"{peer:.0f}" if peer else "-", ratio]
        rows.append([x["model"], cell, *figures, _commit(x)])
    heads = ["model", "prompts", "tokens/s", "peer", "ours / peer", "commit"]
    return ["## Prefill of many prompts", table(heads, rows)] if rows else []


def _mixed(results: Results) -> list[str]:
    rows = [
        [
            x["model"],
            f"{x['batch']} x {x['context']}",
            str(x["prompt_tokens"]),
            f"{x['quiet_ms']:.1f}",
            f"{x['median']:.1f}",
            f"{x['p99']:.1f}",
            f"{x['prompt_ms'] / 1e3:.2f}",
            _commit(x),
        ]
        for x in results.others.get("mixed", [])
    ]
    heads = [
        "model",
        "decoding",
        "prompt",
        "gap before, ms",
        "gap, ms",
        "p99, ms",
        "prompt's first token, s",
        "commit",
    ]
    return ["## Decoding while a long prompt enters", table(heads, rows)] if rows else []


def _growth(results: Results) -> list[str]:
    rows = [
        [
            x["model"],
            str(x["steps"]),
            str(x["batch"]),
            str(x["requests"]),
            *(f"{x['grown'][name] / 2**20:.1f}" for name in
              ("allocated_bytes", "reserved_bytes", "taken_bytes", "resident_bytes")),
            _commit(x),
        ]
        for x in results.others.get("growth", [])
    ]  # fmt: skip
    heads = [
        "model",
        "steps",
        "sequences",
        "requests that ended",
        "allocated, MiB",
        "reserved, MiB",
    ]
    heads += ["taken on the device, MiB", "resident on the host, MiB", "commit"]
    return ["## Growth of memory", table(heads, rows)] if rows else []


def _accuracy(results: Results) -> list[str]:
    rows = []
    for x in results.others.get("accuracy", []):
        errors = x["relative_error_of_logits"]
        rows.append(
            [
                x["model"],
                f"{x['layers']} layers, {x['tokens']} tokens",
                *(_figure(errors.get(name)) for name in ERRORS),
                *(f"{ratio:.2f}" for ratio in ratios(errors).values()),
                f"`{x.get('config', '-')}`",
                _commit(x),
            ]
        )
    heads = ["model", "run", *ERRORS.values(), "prefill / bf16", "decode / bf16", "configuration"]
    heads.append("commit")
    text = (
        "Relative errors of the logits. Ratios: prefill against the reference that rounds as its kernels do, "
        "decode against the plain one, each over PyTorch in bf16; the limit is 1.2. Where the cache rounds KV, all of "
        "these round it too."
    )
    return ["## Accuracy", text, table(heads, rows)] if rows else []


def _kernels(results: Results) -> list[str]:
    """One row for each case: the fastest implementation, and how much slower the others were."""
    cases: dict[tuple[str, str], list[Line]] = {}
    for x in results.others.get("kernel", []):
        if is_priced(x):
            cases.setdefault((x["operation"], x["case"]), []).append(x)
    rows = []
    for (operation, case), lines in cases.items():
        best, *others = sorted(lines, key=lambda x: x["median_us"])
        slower = (
            f"{x['implementation']} {x['median_us'] / best['median_us']:.1f}x" for x in others
        )
        rows.append(
            [
                operation,
                case,
                best["implementation"],
                f"{best['median_us']:.1f}",
                f"{best['floor_us']:.1f}" if "floor_us" in best else "-",
                f"{best['share_of_limit']:.0%}" if "share_of_limit" in best else "-",
                f"{best['tflops']:.0f}",
                f"{best['tb_per_s']:.2f}",
                ", ".join(slower) or "-",
            ]
        )
    heads = ["operation", "case", "fastest", "us", "floor", "share", "TFLOP/s", "TB/s", "others"]
    return ["## Kernels", table(heads, rows)] if rows else []


def cell_words(cell: Cell) -> str:
    """Return a cell of the score table in words."""
    return line_words({"bench": cell.bench, **cell.numbers})


def line_words(line: Line) -> str:
    """Return what a prefill, decode or start line measured."""
    if line["bench"] == "start":
        return "start, kernels cached" if line["cached"] else "start, nothing cached"
    numbers = " x ".join(str(line.get(f)) for f in FIELDS[line["bench"]])
    ranks = [f"{k}{line[k]}" for k in ("tp", "ep", "dp") if line.get(k, 1) != 1]
    made_up = ["(KV made up)"] if line["bench"] == "decode_filled" else []
    return " ".join([line["bench"].removesuffix("_filled"), numbers, *ranks, *made_up])


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; all columns but the first to the right."""
    lines = ["| " + " | ".join(heads) + " |"]
    lines.append("| --- |" + " ---: |" * (len(heads) - 1))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def _figure(number: float | None) -> str:
    return "-" if number is None else f"{number:.4g}"


def _ratio(number: float | None, ours: float | None) -> str:
    return "-" if not number or not ours else f"{number / ours:.2f}"
