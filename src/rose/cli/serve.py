"""`rose serve`: the engine as a child process, the HTTP server in this one."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from rose.cli.options import given_values, tree_options
from rose.cli.processes import private_folder
from rose.cli.progress import Announcer
from rose.config import cli as config_cli
from rose.config.cli import build
from rose.config.engine import EngineConfig
from rose.config.model import ModelConfig
from rose.frontend.config import FrontendConfig
from rose.utils.errors import ConfigError, RoseError
from rose.utils.log import configure_logging

EMBEDDED_MODEL = Path(__file__).parents[1] / "assets" / "tiny-gpt-oss"
EMBEDDED_WORDS = "the embedded model: adds, copies, recalls, calls tools, writes JSON; to all else it answers nonsense"
EXIT_USER_ERROR = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is started, and what the frontend needs to know of it."""

    command: Callable[[str, Path], list[str]]
    """Given the channel's address and a private folder: the command line of the engine."""
    model_folder: Path | None
    """Where the tokenizer is; None: the published vocabulary."""
    model_names: tuple[str, ...]
    logs_progress: bool = False
    """The engine's own log lines say what it does while it starts."""
    runs_model: bool = False
    """The engine needs torch, and a checkpoint in `model_folder`."""


@click.command()
@click.argument("model", required=False)
@click.option(
    "--scripted",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Replay answers from a JSON-lines file instead of running a model (docs/api.md).",
)
@click.option("--log-level", default="INFO", help="DEBUG, INFO, WARNING or ERROR.  [default: INFO]")
@tree_options(FrontendConfig, EngineConfig, skip=frozenset({"model"}))
def serve(model: str | None, scripted: Path | None, log_level: str, **arguments: Any) -> int:
    """Start the engine and the HTTP server for the model in folder MODEL.

    Without MODEL the small embedded model answers. Options of the engine's tree can also be written with
    their place in it, as in --cache.page-tokens.
    """
    log_level = _checked_level(log_level)
    configure_logging(log_level)
    engine_values = given_values(EngineConfig, arguments)
    frontend = _checked(given_values(FrontendConfig, arguments), engine_values)
    if scripted is None:
        launch = model_launch(model, engine_values, frontend, log_level=log_level)
    else:
        launch = scripted_launch(scripted, model, engine_values, frontend)
    return run(launch, frontend)


def model_launch(
    model: str | None, engine_values: dict, frontend: FrontendConfig, *, log_level: str
) -> Launch:
    """Return how to start the real engine.

    Raises  ConfigError where there is no such model folder or an option is wrong.
    """
    from rose.server.launch import engine_command

    folder = _model_folder(model)
    config = build(EngineConfig, {**engine_values, ("model",): str(folder)})
    _check_names_and_sizes(config, folder)
    return Launch(
        command=lambda address, _: engine_command(config, address, log_level=log_level),
        model_folder=folder,
        model_names=frontend.served_model_name or (folder.resolve().name,),
        logs_progress=log_level in ("DEBUG", "INFO"),
        runs_model=True,
    )


def scripted_launch(
    script: Path, model: str | None, engine_values: dict, frontend: FrontendConfig
) -> Launch:
    """Return how to start the scripted engine; MODEL only says whose tokenizer is used.

    Raises  ConfigError for a line that is no answer, and for engine options, which a script does not have.
    """
    from rose.cli.scripts import read_script

    context_tokens = engine_values.pop(("context_tokens",), None)
    if engine_values:
        names = ", ".join("--" + ".".join(path).replace("_", "-") for path in engine_values)
        raise ConfigError(
            f"{names}: a scripted engine computes nothing; allowed with --scripted: options of the server "
            "and --context-tokens; leave the others out"
        )
    folder = None if model is None else _model_folder(model)
    names = frontend.served_model_name or (folder.resolve().name if folder else "scripted",)
    configuration: dict[str, Any] = {"model": names[0], "lines": read_script(script, folder)}
    if context_tokens is not None:
        configuration["context_tokens"] = context_tokens

    def command(address: str, private: Path) -> list[str]:
        path = private / "script.json"
        path.write_bytes(msgspec.json.encode({**configuration, "address": address}))
        return [sys.executable, "-m", "rose.server.scripted", str(path)]

    return Launch(
        command=command,
        model_folder=folder,
        model_names=names,
    )


def run(launch: Launch, config: FrontendConfig) -> int:
    """Start both services, serve until a signal or the engine's death, return the exit code."""
    from rose.frontend.main import new_event_loop

    if launch.runs_model and launch.model_folder is not None:
        _check_engine_can_start(launch.model_folder)
        if launch.model_folder == EMBEDDED_MODEL:
            click.echo(EMBEDDED_WORDS, err=True)
    options = config_cli.options(FrontendConfig, EngineConfig)
    announcer = Announcer(
        worded=lambda text: config_cli.with_flags(text, options), is_moving=not launch.logs_progress
    )
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_run(launch, config, announcer))
    finally:
        announcer.close()


async def _run(launch: Launch, config: FrontendConfig, announcer: Announcer) -> int:
    from rose.cli.frontends import Children, ChildSpec, EngineNotice, shared_config
    from rose.cli.supervisor import Supervisor
    from rose.frontend.formatters.registry import build_formatter
    from rose.frontend.jobs import Formatters
    from rose.frontend.main import Frontend, listen
    from rose.frontend.tokenizer import load_tokenizer

    # The tokenizer first: a folder without a usable one is refused before any weight is read.
    tokenizer = load_tokenizer(launch.model_folder)
    formatters = Formatters(
        chat=build_formatter(config.formatter, tokenizer), text=build_formatter("plain", tokenizer)
    )
    with private_folder() as folder:
        listener, children = listen(config), None
        if config.frontends > 1:
            config = shared_config(config, folder)
            spec = ChildSpec(
                config=config,
                model_folder=str(launch.model_folder) if launch.model_folder else None,
                model_names=launch.model_names,
                folder=str(folder),
                listener=listener.fileno(),
                log_level=logging.getLogger("rose").level,
            )
            children = Children(spec, announce=announcer)
        frontend = Frontend(
            config,
            formatters=formatters,
            model_names=launch.model_names,
            announce=announcer,
            children=children,
            shared_folder=folder if children else None,
        )
        supervisor = Supervisor(
            launch.command,
            folder,
            max_restarts=config.max_engine_restarts,
            announce=announcer,
            tell=lambda address, reason: EngineNotice(address=address, reason=reason).write(folder),
        )
        code = await frontend.run(supervisor.keep, listener=listener)
        # An engine that refused its configuration has said why; its exit code is ours.
        return EXIT_USER_ERROR if supervisor.refusal_code == EXIT_USER_ERROR else code


def _checked(frontend_values: dict, engine_values: dict) -> FrontendConfig:
    """Return the frontend's tree once both trees are right, so that all problems are listed at once."""
    problems: list[str] = []
    frontend = None
    try:
        frontend = build(FrontendConfig, frontend_values)
    except ConfigError as error:
        problems += error.problems
    try:
        build(EngineConfig, {**engine_values, ("model",): ""})
    except ConfigError as error:
        problems += error.problems
    if problems or frontend is None:
        raise ConfigError(problems)
    return frontend


def _model_folder(model: str | None) -> Path:
    if model is None:
        if not EMBEDDED_MODEL.is_dir():
            raise ConfigError(
                f"no model was named and this installation has no embedded one ({EMBEDDED_MODEL}); "
                "give the folder of a gpt-oss checkpoint: rose serve FOLDER"
            )
        return EMBEDDED_MODEL
    folder = Path(model)
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise ConfigError(
            f"model {model!r}: found {found} there; allowed: the folder of a gpt-oss checkpoint on this machine "
            "(nothing is downloaded); see rose inspect"
        )
    return folder


def _check_engine_can_start(folder: Path) -> None:
    """Say here, in one line, what the engine's process could only end with."""
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    places = [folder, folder / "original"]
    if not any((place / "config.json").is_file() for place in places):
        raise ConfigError(
            f"model {str(folder)!r}: found no config.json there; needed: the folder of a gpt-oss checkpoint, with "
            "config.json and *.safetensors; check the path, or write a made-up one with rose synth"
        )


def _check_names_and_sizes(config: EngineConfig, folder: Path) -> None:
    """Refuse at once what the engine would refuse after it has loaded torch.

    Raises  ConfigError with every problem
    """
    from rose.decoders.registry import find_decoder
    from rose.kernels.registry import require_operations
    from rose.runtime.limits import context_limit, require_one_device

    model_config = _model_config(folder)
    checks: list[Callable[[], object]] = [
        lambda: require_one_device(config.parallel),
        lambda: find_decoder(config.decoding.decoder),
        lambda: require_operations(config.kernels.only),
    ]
    if model_config is not None:
        checks.append(lambda: context_limit(config, model_config))
    problems = []
    for check in checks:
        try:
            check()
        except RoseError as error:
            problems += str(error).splitlines()
    if problems:
        raise ConfigError(problems)


def _model_config(folder: Path) -> ModelConfig | None:
    """Return the sizes that config.json tells; None where it is not plain to read, which the engine explains."""
    from rose.models.registry import entry

    try:
        values = json.loads((folder / "config.json").read_text())
        return entry(values["model_type"]).config.from_json(values)  # type: ignore[attr-defined]
    except (
        RoseError,
        OSError,
        ValueError,
        ArithmeticError,
        LookupError,
        TypeError,
        AttributeError,
    ):
        return None


def _checked_level(level: str) -> str:
    allowed = ("DEBUG", "INFO", "WARNING", "ERROR")
    if level.upper() not in allowed:
        raise ConfigError(f"log level {level!r}; allowed: {', '.join(allowed)}; change --log-level")
    return level.upper()
