"""Options of configuration trees (`rose.config.cli`) as click options, and kinds of option that commands share."""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.core import ParameterSource

from rose.config import cli as config_cli
from rose.utils.errors import ConfigError, ContractError

Command = TypeVar("Command", bound=Callable[..., Any])
Values = dict[config_cli.Path, Any]


def tree_options(*roots: type, skip: frozenset[str] = frozenset()) -> Callable[[Command], Command]:
    """Decorate a command with one option per leaf of the trees; `given_values` reads them back.

    Errors that name places in the trees leave the command with its flags beside them.
    """

    def decorate(command: Command) -> Command:
        command = flags_in_errors(*roots)(command)
        for option in reversed(config_cli.options(*roots, skip=skip)):
            command = click.option(*_declarations(option), **_settings(option))(command)
        return command

    return decorate


def flags_in_errors(*roots: type) -> Callable[[Command], Command]:
    """Decorate a command so that its errors name what was typed (`--weights`) beside places in the trees.

    Only flags that the command has: `rose bench` takes some of the engine's options under the same names.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(*arguments: Any, **options: Any) -> Any:
            try:
                return command(*arguments, **options)
            except (ConfigError, ContractError) as error:
                context = click.get_current_context()
                flags = {flag for p in context.command.params for flag in p.opts}
                known = [o for o in config_cli.options(*roots) if o.flags[0] in flags]
                text = config_cli.with_flags(str(error), known)
                raise ConfigError(text.splitlines()) from error

        return cast(Command, run)

    return decorate


def parameter_name(path: config_cli.Path) -> str:
    """Return the name under which click hands over a leaf."""
    return "tree__" + "__".join(path)


def given_values(root: type, arguments: dict[str, Any]) -> Values:
    """Return the leaves of one tree that the command line set, by path.

    Raises  ConfigError for empty texts: `--api-key-file "$UNSET"` would otherwise leave a server open
    """
    values, empty, twice = {}, [], []
    for option in config_cli.options(root):
        value = arguments.get(parameter_name(option.path))
        if value is None or value == ():
            continue
        texts = value if isinstance(value, tuple) else (value,)
        if "" in texts:
            empty.append(option.flags[0])
        if option.is_mapping:
            twice += [f"{option.flags[0]}: {text}" for text in _given_twice(value)]
            value = dict(value)
        values[option.path] = value
    if empty:
        raise ConfigError(f"{', '.join(empty)}: found an empty text; give a value or leave it out")
    if twice:
        raise ConfigError("\n".join(twice))
    return values


def _given_twice(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Say which names have more than one value; the last would win, and the others be ignored."""
    values: dict[str, list[str]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return [
        f"{name} is given {len(found)} times, as {' and as '.join(found)}; give it once"
        for name, found in values.items()
        if len(found) > 1
    ]


def _declarations(option: config_cli.Option) -> list[str]:
    flags = list(option.flags)
    if option.kind is bool and not option.is_repeated:
        # A dotted flag gets its --no- after the dots: --cache.no-x.
        flags = [f"{flag}/{_negated(flag)}" for flag in flags]
    return [*flags, parameter_name(option.path)]


def _negated(flag: str) -> str:
    head, _, leaf = flag.removeprefix("--").rpartition(".")
    return f"--{head + '.' if head else ''}no-{leaf}"


def _settings(option: config_cli.Option) -> dict[str, Any]:
    # Default None: only what was typed is passed on; the dataclass stays the one source of defaults.
    settings: dict[str, Any] = {"default": None, "help": _help(option)}
    if option.is_mapping:
        return settings | {"multiple": True, "type": NameValue()}
    if option.is_repeated:
        return settings | {"multiple": True, "type": option.kind}
    if option.kind is bool:
        return settings
    kind = Choice(option.choices) if option.choices else option.kind
    return settings | {"type": kind}


def _help(option: config_cli.Option) -> str:
    default = option.default
    # What a field calls None is, on a command line, an option that was left out.
    text = option.help.replace("; None: ", "; left out: ").replace("None: ", "Left out: ")
    if default is None or default in ((), {}, ""):
        return text
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    return f"{text}  [default: {shown}]".strip()


class Choice(click.Choice):
    """One of some words, shown as they are written everywhere; click shows what it compares, dashes for underscores."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the words for the help."""
        return f"[{'|'.join(map(str, self.choices))}]"

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Return the words for the refusal of another."""
        return f"{value!r} is not one of {', '.join(map(repr, self.choices))}"


class OutputFile(click.Path):
    """A file to be written, with its folders: refused before anything is computed for it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if not os.fspath(value):
            self.fail("a file without a name cannot be written", param, ctx)
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        why = _why_not_written(path)
        if why is not None:
            self.fail(f"{path} cannot be written: {why}", param, ctx)
        return path


def _why_not_written(path: Path) -> str | None:
    """Try to write a file, leave everything as it was, and return what the system says against it, or None."""
    is_new = not path.exists()
    if not is_new and not path.is_file():
        return None  # a device or a pipe: to open it would already be an act
    there = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not there.is_dir():
        return f"{there} is a {'link to nothing' if there.is_symlink() else 'file'}"
    if not os.access(there, os.W_OK):
        return f"{there} may not be written"
    try:
        if there == path.absolute().parent:
            path.open("ab").close()
            if is_new:
                Path(os.path.realpath(path)).unlink()  # of a link what it points to, made just now
        else:
            tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return f"{there} says {error.strerror}"
    return None


class NameValue(click.ParamType):
    """A pair with an equals sign; `form` is how help and refusals write it."""

    def __init__(self, form: str = "NAME=VALUE") -> None:
        self.name = form

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Split at the first equals sign."""
        if isinstance(value, tuple):
            return value
        name, separator, rest = str(value).partition("=")
        if not separator or not name:
            self.fail(f"{value!r} is not {self.name}", param, ctx)
        return name, rest


class AnyNumber(click.types.FloatParamType):
    """A number; nan and infinities are none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read a finite number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number


class Number(click.FloatRange):
    """A number within bounds; nan, which no bound stops, is none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read a finite number within the bounds."""
        return super().convert(AnyNumber().convert(value, param, ctx), param, ctx)


SEED = click.IntRange(0, 2**63 - 1)
"""What torch takes as a seed; of one below 0 or beyond it would make another, or fail with a traceback."""


def _one_key(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Take the first key of a variable that may hold several, as a server reads it; a callback of click."""
    source = context.get_parameter_source(parameter.name or "")
    if value is None or source is not ParameterSource.ENVIRONMENT:
        return value
    keys = value.replace(",", " ").split()
    return keys[0] if keys else None


api_key_option = click.option(
    "--api-key",
    envvar="ROSE_API_KEY",
    callback=_one_key,
    help="Key that the server asks for; better in the variable ROSE_API_KEY.",
)
"""Of commands that ask a server."""


def as_dict(
    _context: click.Context, _parameter: click.Parameter, value: tuple[tuple[str, str], ...]
) -> dict[str, str]:
    """Collect the pairs of a repeated NameValue option; a callback of click."""
    if twice := _given_twice(value):
        raise click.BadParameter("; ".join(twice))
    return dict(value)


def numbers(_context: click.Context, _parameter: click.Parameter, value: str) -> list[int]:
    """Read whole numbers with commas between; a callback of click."""
    try:
        found = [int(word) for word in value.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise click.BadParameter(
            f"{value!r}; allowed: whole numbers of at least 1, with commas between"
        )
    return found
