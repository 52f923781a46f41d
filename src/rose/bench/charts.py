"""Charts of result files: cost against speed for a user, prefill against length, the closed loop. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rose.bench.cost import PRICE, is_priced, usd_per_million
from rose.bench.results import Line, Results
from rose.bench.targets import Targets
from rose.utils.errors import RoseError

MODELS = ("20b", "120b")
OURS, OTHER, LIMIT, PAST = "#c2185b", "#37474f", "#9e9e9e", "#8d6e63"
MARKER_POINTS = 4
LOAD_SHADES = (OURS, "#1565c0", "#2e7d32", "#ef6c00")
"""Of the closed loop's curves, in their order."""
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def draw(
    results: Results, targets: Targets, folder: Path, *, price: float = PRICE
) -> list[tuple[str, Path]]:
    """Write the charts that the results have points for; return (caption, file) pairs.

    Raises  RoseError where matplotlib is not installed
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise RoseError(
            "charts need matplotlib, which is not installed here; "
            "pip install 'rose-engine[report]', or leave out --charts"
        ) from None
    mpl.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    cost, prefill, load = (folder / f"{name}.png" for name in ("cost", "prefill", "load"))
    with mpl.rc_context(STYLE):
        _cost_chart(results, targets, cost, price)
        _prefill_chart(results, targets, prefill)
        made = _load_chart(results, load)
    return [
        (
            f"Cost per million output tokens against tokens/s per user, at {price:g} USD per GPU hour",
            cost,
        ),
        ("Prefill latency against prompt length", prefill),
        *([("Closed loop: output tokens/s and time to the first token", load)] if made else []),
    ]


COMPARED_CONTEXT = 8192
"""Of floor and peer."""
Point = tuple[float, float, int]
"""Tokens/s per user, dollars per million output tokens, batch."""


def decode_points(lines: Sequence[tuple[int, float]], price: float) -> list[Point]:
    """Turn (batch, milliseconds per step) pairs into points, by batch."""
    return [
        (1e3 / ms, usd_per_million(seconds=ms / 1e3, tokens=batch, price=price), batch)
        for batch, ms in sorted(lines)
    ]


def decode_lines(results: Results, model: str) -> dict[int, list[tuple[int, float]]]:
    """Return (batch, milliseconds) of one GPU's decode lines by context; made-up KV only where nothing else is."""
    found: dict[int, dict[int, float]] = {}
    for line in _of(results, "decode_filled", model) + _of(results, "decode", model):
        found.setdefault(line["context"], {})[line["batch"]] = line["median"]
    return {context: list(found[context].items()) for context in sorted(found)}


def _of(results: Results, bench: str, model: str) -> list[Line]:
    return [
        line
        for line in results.cells.values()
        if line["bench"] == bench and line["model"] == model and line.get("tp", 1) == 1
    ]


def _figure(
    title: str, names: Sequence[str] = tuple(f"gpt-oss-{m}" for m in MODELS)
) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(names))
    figure.suptitle(title, fontsize=11)
    for axis, name in zip(axes, names, strict=True):
        axis.set_title(name, fontsize=10)
    return figure, axes


def _cost_chart(results: Results, targets: Targets, path: Path, price: float) -> None:
    figure, axes = _figure(
        f"Decode on one H200 at {price:g} USD per GPU hour; numbers are sequences"
    )
    for axis, model in zip(axes, MODELS, strict=True):
        for name, style in (
            ("floor", {"color": LIMIT, "ls": "--", "marker": "", "label": "floor, context 8192"}),
            ("peer", {"color": OTHER, "marker": "s", "label": "peer, context 8192"}),
        ):
            cells = [c for c in targets.cells.values() if (c.bench, c.model) == ("decode", model)]
            pairs = [(c.numbers["batch"], getattr(c, name)) for c in cells]
            _plot_points(axis, decode_points([p for p in pairs if p[1]], price), style)
        others = iter(((0.7, "-."), (0.6, ":"), (0.5, (0, (1, 3))), (0.4, (0, (6, 3)))))
        for context, lines in decode_lines(results, model).items():
            is_compared = context == COMPARED_CONTEXT
            alpha, line = (1.0, "-") if is_compared else next(others, (0.4, "-"))
            style = {
                "color": OURS,
                "alpha": alpha,
                "ls": line,
                "marker": "o",
                "label": f"rose, context {context}",
            }
            # One curve's labels are enough: the others have the same batches.
            _plot_points(axis, decode_points(lines, price), style, has_labels=is_compared)
        axis.set_yscale("log")
        axis.set_xlim(left=0)
        axis.set_xlabel("tokens/s per user")
        axis.yaxis.set_major_formatter(_plain)
        axis.yaxis.set_minor_formatter(_sparse)
        axis.legend(loc="lower right")
    axes[0].set_ylabel("USD per million output tokens")
    # Above and to the left first: there are neither the curve itself nor those of shorter contexts.
    place_labels(figure, (ABOVE_LEFT, ABOVE, BELOW_RIGHT, BELOW, HIGH, LOW))
    figure.savefig(path)


Place = tuple[tuple[int, int], str]
"""Of a label beside its point: offset in points, and which of its sides is there."""
ABOVE_LEFT: Place = ((-3, 3), "right")
ABOVE: Place = ((0, 5), "center")
ABOVE_RIGHT: Place = ((3, 4), "left")
BELOW_LEFT: Place = ((-3, -9), "right")
BELOW: Place = ((0, -11), "center")
BELOW_RIGHT: Place = ((3, -9), "left")
HIGH: Place = ((-1, 8), "center")
LOW: Place = ((3, -12), "center")
"""Between steep curves that are close there is room for a label only above or below where they are apart."""


def place_labels(figure: Any, places: Sequence[Place]) -> None:
    """Put each label to the first place beside its point where it meets fewest curves, markers, labels and left edges.

    Call it last: what moves the axes later moves points, and labels with them, by different amounts.
    """
    figure.draw_without_rendering()  # sizes and scales are set only now
    for axis in figure.axes:
        curves = [x.get_transform().transform_path(x.get_path()) for x in axis.lines]
        marked = [x for x in axis.lines if x.get_marker() not in ("", "None")]
        markers = [m for x in marked for m in x.get_transform().transform(x.get_xydata())]
        taken: list[Any] = []
        for label in axis.texts:
            met = []
            for place in places:
                _put(label, place)
                box = label.get_window_extent().padded(1)
                crossed = sum(curve.intersects_bbox(box, filled=False) for curve in curves)
                covered = sum(box.overlaps(other) for other in taken)
                near = box.padded(MARKER_POINTS / 2 * figure.dpi / 72)
                covered += sum(near.contains(*marker) for marker in markers)
                met.append(crossed + covered + (box.x0 < axis.bbox.x0))
            _put(label, places[met.index(min(met))])
            taken.append(label.get_window_extent())


def _put(label: Any, place: Place) -> None:
    label.xyann, side = place
    label.set_horizontalalignment(side)


def _plot_points(
    axis: Any, points: list[Point], style: dict[str, Any], *, has_labels: bool = False
) -> None:
    if not points:
        return
    axis.plot([p[0] for p in points], [p[1] for p in points], lw=1.6, ms=MARKER_POINTS, **style)
    for x, y, batch in points if has_labels else ():
        axis.annotate(
            str(batch),
            (x, y),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=7.5,
            color=style["color"],
            alpha=style.get("alpha", 1.0),
        )


def _prefill_chart(results: Results, targets: Targets, path: Path) -> None:
    figure, axes = _figure("Prefill of one unseen prompt on one H200")
    for axis, model in zip(axes, MODELS, strict=True):
        cells = [c for c in targets.cells.values() if (c.bench, c.model) == ("prefill", model)]
        for name, style in (
            ("seed", {"color": PAST, "marker": "^", "label": "seed, as published"}),
            ("peer", {"color": OTHER, "marker": "s", "label": "peer"}),
            ("floor", {"color": LIMIT, "ls": "--", "label": "floor"}),
        ):
            points = [(c.numbers["tokens"], getattr(c, name)) for c in cells if getattr(c, name)]
            axis.plot(*zip(*points, strict=True), lw=1.6, ms=MARKER_POINTS, **style)
        ours = sorted((x["tokens"], x["median"]) for x in _of(results, "prefill", model))
        if ours:
            axis.plot(*zip(*ours, strict=True), color=OURS, marker="o", lw=2, ms=4.5, label="rose")
            for tokens, seconds in ours:
                axis.annotate(
                    f"{seconds:.3g}",
                    (tokens, seconds),
                    xytext=(5, -9),
                    textcoords="offset points",
                    fontsize=7.5,
                    color=OURS,
                )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sorted({c.numbers["tokens"] for c in cells} | {t for t, _ in ours}))
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:.0f}")
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(_plain)
        axis.set_xlabel("prompt tokens")
        axis.legend(loc="upper left")
    axes[0].set_ylabel("seconds to the first token")
    figure.savefig(path)


Curve = tuple[str, int, int]
"""Model, tokens in, tokens out."""


def load_lines(results: Results) -> dict[Curve, list[Line]]:
    """Return the closed loop's lines of one kind of GPU by curve and number in flight, the newest of each number."""
    found: dict[Curve, dict[int, Line]] = {}
    lines = filter(is_priced, results.others.get("load", []))
    for line in sorted(lines, key=lambda x: x.get("date", "")):
        curve = (line["model"], line["input_tokens"], line["output_tokens"])
        found.setdefault(curve, {})[line["in_flight"]] = line
    return {c: [found[c][n] for n in sorted(found[c])] for c in sorted(found)}


def _load_chart(results: Results, path: Path) -> bool:
    """Draw the closed loop; False where nothing of it was measured."""
    curves = load_lines(results)
    if not curves:
        return False
    title = "Closed loop on one H200; numbers are requests in flight"
    figure, (rate, first) = _figure(title, ("Output", "First token, median and p99 (thin)"))
    shades = [*LOAD_SHADES, *[PAST] * len(curves)]
    for color, ((model, given, made), lines) in zip(shades, curves.items(), strict=False):
        style = {"color": color, "marker": "o", "label": f"{model}, {given} in, {made} out"}
        points = [(1e3 / x["token_ms"], x["output_tokens_per_s"], x["in_flight"]) for x in lines]
        _plot_points(rate, points, style, has_labels=True)
        in_flight = [x["in_flight"] for x in lines]
        first.plot(
            in_flight, [x["first_token_ms"] for x in lines], lw=1.6, ms=MARKER_POINTS, **style
        )
        first.plot(in_flight, [x["first_token_ms_p99"] for x in lines], lw=0.8, color=color)
    rate.set_xlim(left=0)
    rate.set_yscale("log")
    rate.yaxis.set_major_formatter(_plain)
    rate.yaxis.set_minor_formatter(_sparse)
    rate.set_xlabel("tokens/s per user")
    rate.set_ylabel("output tokens/s")
    first.set_xscale("log", base=2)
    first.set_yscale("log")
    first.set_xlabel("requests in flight")
    first.set_ylabel("ms")
    first.xaxis.set_major_formatter(_plain)
    first.yaxis.set_major_formatter(_plain)
    first.yaxis.set_minor_formatter(_sparse)
    for axis in (rate, first):
        axis.legend(loc="best")
    place_labels(figure, (ABOVE_RIGHT, BELOW_LEFT, BELOW, ABOVE_LEFT))
    figure.savefig(path)
    return True


def _plain(value: float, _position: int) -> str:
    return f"{value:g}"


def _sparse(value: float, _position: int) -> str:
    """Label the 2s and 5s between powers of ten."""
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""
