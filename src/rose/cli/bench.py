"""`rose bench`: measure this machine on synthetic weights of the real shapes; every line says how to repeat it.

Needs the engine's packages only inside the commands, so that help is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from rose.cli.options import (
    SEED,
    Choice,
    NameValue,
    Number,
    OutputFile,
    as_dict,
    flags_in_errors,
    numbers,
)

SIZES = ("20b", "120b", "tiny")
PATH = OutputFile()
FOLDER = click.Path(path_type=Path, file_okay=False)


def _add(command: Any, options: tuple[Any, ...]) -> Any:
    for option in reversed(options):
        command = option(command)
    return command


def _list(name: str, default: str, text: str) -> Any:
    return click.option(name, default=default, show_default=True, callback=numbers, help=text)


def _number(name: str, default: int, text: str, *, least: int = 1) -> Any:
    kind = click.IntRange(min=least)
    return click.option(name, type=kind, default=default, show_default=True, help=text)


_record_options = (
    click.option("--json", "path", type=PATH, help="Append JSON lines to this file."),
    click.option("--commit", help="Commit of the tree, where it travels without its repository."),
)
_setup_options = (
    click.option("--size", type=Choice(SIZES), default="tiny", show_default=True,
                 help="Shape of the model."),
    click.option("--weights", default="mxfp4", show_default=True, help="Resident weight format."),
    click.option("--projections", help="Format of projections and head; default: what --weights says. "
                 "Lines with one of their own are marked as options."),
    click.option("--kv", default="auto", show_default=True,
                 help="Format of the KV cache; auto: the activations'. Lines with fp8_e4m3 are marked as options."),
    click.option("--device", type=Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
    click.option("--only", multiple=True, type=NameValue("operation=implementation"),
                 callback=as_dict, metavar="OP=NAME", help="Use one implementation of an operation."),
    click.option("--layers", type=click.IntRange(min=1), help="Keep only the first layers (not a result, a trial)."),
    click.option("--kv-tokens", type=click.IntRange(min=1), help="Tokens of KV to hold; default: what memory leaves."),
    _number("--max-step-tokens", 16384, "New tokens of all sequences in one step."),
    _number("--max-mixed-tokens", 4096, "The same while some sequences decode."),
    click.option("--graphs/--no-graphs", default=True, help="Replay decode steps from CUDA graphs."),
    click.option("--prefix-cache/--no-prefix-cache", default=True,
                 help="Time decode with its prompts in the prefix cache; or prefill them for real."),
)  # fmt: skip
_fill_option = click.option(
    "--fill",
    is_flag=True,
    help="Put prompts into the prefix cache without computing them: their KV is random numbers.",
)
_profile_option = click.option(
    "--profile",
    type=FOLDER,
    help="Profile one more run of each prefill and decode cell: a trace and a table per kernel in this folder.",
)
_until_option = click.option(
    "--until",
    type=Number(min=0, min_open=True),
    help="Begin no cell after so many seconds; cells left out so make the exit status 1.",
)
_prefill_options = (
    _list("--tokens", "8192,32768,65536,128000", "Prompt lengths."),
    _number("--prompts", 1, "Prompts given at once."),
    _number("--repeats", 3, "Samples per length, after one warm-up of a single prompt."),
)
_decode_options = (
    _list("--batches", "1,2,4,8,16,32,64,128", "Sequences that decode."),
    _list("--context", "8192,32768", "Tokens of each prompt."),
    _number("--repeats", 4, "Samples per cell, with the prefix cache."),
    _fill_option,
)
_load_options = (
    _list("--input-tokens", "1024,8192", "Prompt lengths."),
    _number("--output-tokens", 1024, "Tokens that each request generates.", least=2),
    _list("--in-flight", "1,2,4,8,16,32,64,128,256",
          "Requests that run at once, each replaced as it ends; what the engine cannot run side by side "
          "(scheduler.max_sequences, the KV cache) is left out, and said."),
    _number("--rounds", 3, "Whole requests to measure, per request in flight."),
    click.option("--seconds", type=Number(min=0, min_open=True),
                 help="End a cell after so long, and count what was seen of requests that run on."),
    _fill_option,
)  # fmt: skip
_mixed_options = (
    _number("--batch", 32, "Sequences that decode."),
    _number("--context", 1024, "Tokens of their prompts."),
    _number("--prompt-tokens", 32768, "The prompt that enters."),
    _number("--repeats", 3, "Prompts, after one warm-up."),
)
_growth_options = (
    _number("--steps", 1000, "Steps between the two looks."),
    _number("--batch", 32, "Requests that are always running."),
    _number("--prompt-tokens", 1024, "Tokens of each prompt."),
    _number("--output-tokens", 128, "Tokens that each request generates."),
)
_PARTS = {
    "prefill": ("Time to the first token of an unseen prompt.", _prefill_options),
    "decode": ("Time per step with the whole batch decoding.", _decode_options),
    "load": ("Closed loop of requests: throughput and times.", _load_options),
    "mixed": ("Token gaps while a long prompt enters.", _mixed_options),
    "growth": ("Memory before and after many steps.", _growth_options),
}
"""What one engine can be measured by, alone or one after the other in `sweep`: name -> words, options."""
USUAL = (
    "The usual numbers are for a large GPU. On a CPU all but growth say first about how long they take, where that is "
    "more than a minute; decode --batches 1,2 --context 256 is one of the tiny size that takes less."
)
"""Below the help of what measures an engine."""


def _errors(command: Any) -> Any:
    from rose.config.engine import EngineConfig

    return flags_in_errors(EngineConfig)(command)


def _engine(command: Any) -> Any:
    return _add(_errors(command), (*_setup_options, *_record_options))


AXES = {
    "prefill": {"tokens": "tokens"},
    "decode": {"batches": "batch", "context": "context"},
    "load": {"input_tokens": "input_tokens", "in_flight": "in_flight"},
}
"""Options that are lists, and what their numbers are called in a cell."""


def _asked(part: str) -> frozenset[str]:
    """Return the arguments of a part's cells whose numbers were typed: they may not all be left out."""
    context = click.get_current_context()
    return frozenset(
        argument
        for option, argument in AXES.get(part, {}).items()
        if context.get_parameter_source(option) is ParameterSource.COMMANDLINE
    )


def _records(command: Any) -> Any:
    return _add(command, _record_options)


@click.group()
def bench() -> None:
    """Measure this machine; every line tells how to repeat it."""


def _alone(name: str, *more: Any) -> Any:
    """Decorate the command that measures one part on an engine of its own; `more`: further options."""
    words, options = _PARTS[name]

    def decorate(command: Any) -> Any:
        command = _add(_engine(command), (*options, _until_option, *more))
        return bench.command(name, short_help=words, epilog=USUAL)(command)

    return decorate


@_alone("prefill", _profile_option)
def prefill(tokens: list[int], prompts: int, repeats: int, **options: Any) -> int:
    """Time from submission of an unseen prompt to its first token; or tokens/s of many prompts."""
    from rose.bench.run import prefill_part, run_parts

    part = prefill_part(tokens=tokens, prompts=prompts, repeats=repeats)
    return run_parts([part], asked=[_asked("prefill")], **options)


@_alone("decode", _profile_option)
def decode(
    batches: list[int], context: list[int], repeats: int, *, fill: bool, **options: Any
) -> int:
    """Time per step with the whole batch decoding at temperature 1."""
    from rose.bench.run import decode_part, run_parts

    part = decode_part(batches=batches, context=context, repeats=repeats, fill=fill)
    return run_parts([part], asked=[_asked("decode")], **options)


@bench.command(short_help="Prefill and decode on one engine: the score table.", epilog=USUAL)
@_list("--tokens", "8192,32768,65536,128000", "Prompt lengths.")
@_list("--batches", "1,8,32,128", "Sequences that decode.")
@_list("--context", "8192", "Tokens of each prompt that decodes.")
@_number("--repeats", 3, "Samples per prompt length, after one warm-up.")
@_engine
@_until_option
@_profile_option
def latency(
    tokens: list[int], batches: list[int], context: list[int], repeats: int, **options: Any
) -> int:
    """Run prefill and decode on one engine: the cells of the score table, one resident set of weights."""
    from rose.bench.run import decode_part, prefill_part, run_parts

    prompts = prefill_part(tokens=tokens, prompts=1, repeats=repeats)
    steps = decode_part(batches=batches, context=context)
    return run_parts([prompts, steps], asked=[_asked("prefill"), _asked("decode")], **options)


@_alone("load")
def load(
    input_tokens: list[int],
    output_tokens: int,
    in_flight: list[int],
    rounds: int,
    seconds: float | None,
    *,
    fill: bool,
    **options: Any,
) -> int:
    """Closed loop: output tokens/s, time to first token, time per token."""
    from rose.bench.run import load_part, run_parts

    part = load_part(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        in_flight=in_flight,
        rounds=rounds,
        seconds=seconds,
        fill=fill,
    )
    return run_parts([part], asked=[_asked("load")], **options)


@_alone("mixed")
def mixed(batch: int, context: int, prompt_tokens: int, repeats: int, **options: Any) -> int:
    """99th percentile of the token gap of decoding sequences while a long prompt enters."""
    from rose.bench.run import mixed_part, run_parts

    part = mixed_part(batch=batch, context=context, prompt_tokens=prompt_tokens, repeats=repeats)
    return run_parts([part], **options)


@_alone("growth")
def growth(steps: int, batch: int, prompt_tokens: int, output_tokens: int, **options: Any) -> int:
    """Memory of the device and of this process, before and after many steps with requests that come and go."""
    from rose.bench.run import growth_part, run_parts

    part = growth_part(
        steps=steps, batch=batch, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )
    return run_parts([part], **options)


@bench.group(
    chain=True, short_help="Several of these on one engine, one after the other.", epilog=USUAL
)
@_engine
@_until_option
@_profile_option
def sweep(**_options: Any) -> None:
    """Measure parts one after the other on one engine, each with its own options behind its name.

    rose bench sweep --size 20b  decode --batches 1,8 --context 1024  mixed  load --in-flight 1,8
    """


@sweep.result_callback()
@_errors
def _measure(parts: list[Any], **options: Any) -> int:
    from rose.bench.run import run_parts

    return run_parts([part for part, _ in parts], asked=[asked for _, asked in parts], **options)


def _add_part(name: str, words: str, options: tuple[Any, ...]) -> None:
    def make(**chosen: Any) -> Any:
        from rose.bench import run

        return run.PARTS[name](**chosen), _asked(name)

    sweep.command(name, help=words)(_add(make, options))


for _name, (_words, _options) in _PARTS.items():
    _add_part(_name, _words, _options)


@bench.command(short_help="Time from a process's start to its first token.")
@click.option(
    "--cached/--fresh",
    "is_cached",
    default=True,
    show_default=True,
    help="With the compiled kernels of an earlier run, or with empty caches.",
)
@_number("--repeats", 3, "Processes to start.")
@_engine
def start(is_cached: bool, repeats: int, **options: Any) -> None:
    """Time from the start of a process to the first token of a warm-up request."""
    from rose.bench.start import run_start

    run_start(is_cached=is_cached, repeats=repeats, **options)


@bench.command()
@click.argument("operations", nargs=-1)
@click.option("--device", type=Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--implementation", metavar="NAME", help="One implementation alone.")
@click.option("--case", metavar="NAME", help="One case alone.")
@_records
def kernels(operations: tuple[str, ...], **options: Any) -> int:
    """Check, then time, every kernel over its timed cases."""
    from rose.bench.kernels import run_kernels
    from rose.bench.progress import BenchProgress

    with BenchProgress().running() as progress:
        is_right = run_kernels(operations=list(operations), say=progress.done, **options)
    return 0 if is_right else 1


@bench.command(short_help="CPU cost of a step without a model.")
@_number("--sequences", 128, "Sequences that decode.")
@_number("--steps", 2000, "Steps to time; each part is timed in a run of its own.")
@click.option(
    "--prefix-cache/--no-prefix-cache", default=True, help="With or without the prefix cache."
)
@_records
def scheduler(sequences: int, steps: int, *, prefix_cache: bool, **options: Any) -> None:
    """CPU cost of one decode step with a null model: from schedule to events encoded and sent."""
    from rose.bench.scheduler import report, run_scheduler

    line = run_scheduler(sequences=sequences, steps=steps, is_caching=prefix_cache, **options)
    click.echo(report(line))


@bench.command()
@_number("--tokens", 4096, "Tokens of the prompt.")
@_number("--decoded", 32, "Of them, how many are decoded one by one in the second run.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the prompt.")
@click.option(
    "--most",
    type=Number(min=0, min_open=True),
    help="Fail where an error passes so many times that of PyTorch in bf16.",
)
@_engine
def accuracy(tokens: int, decoded: int, seed: int, most: float | None, **options: Any) -> int:
    """Errors of the logits against the float32 reference; keep few --layers, the reference expands all weights."""
    from rose.bench.accuracy import run_accuracy
    from rose.bench.ratios import ratios

    line = run_accuracy(tokens=tokens, decoded=decoded, seed=seed, **options)
    errors = line["relative_error_of_logits"]
    for name, error in errors.items():
        click.echo(f"{name:28} {error:.3e}")
    found = ratios(errors)
    for name, ratio in found.items():
        click.echo(f"{name} over PyTorch in bf16: {ratio:.3f}")
    return 1 if most is not None and max(found.values()) > most else 0


@bench.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=PATH, help="Write here; default: standard output.")
@click.option("--charts", type=FOLDER, help="Draw charts into this folder (needs matplotlib).")
@click.option(
    "--price",
    type=Number(min=0, min_open=True),
    default=3.0,
    show_default=True,
    help="US dollars per GPU and hour.",
)
def report(files: tuple[Path, ...], out: Path | None, charts: Path | None, price: float) -> None:
    """Tables and charts of result FILES beside seed, peer, goal and floor; the newest line of a cell counts."""
    import os

    from rose.bench.report import markdown, summary
    from rose.bench.results import read
    from rose.bench.targets import load_targets

    results, targets = read(files), load_targets()
    links = []
    if charts is not None:
        from rose.bench.charts import draw

        base = Path.cwd() if out is None else out.parent
        links = [
            (caption, Path(os.path.relpath(path, base)).as_posix())
            for caption, path in draw(results, targets, charts, price=price)
        ]
    text = markdown(results, targets, charts=links, price=price)
    if out is None:
        click.echo(text, nl=False)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    click.echo(summary(results, targets))
