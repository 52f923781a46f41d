"""The `rose` command: a table of sub-commands, each imported only when it is run.

Errors written for people are printed as `error: ...` with exit code 2; nobody sees a traceback for a mistake
of theirs. Knows nothing of what the commands do.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import click

from rose.utils.errors import RoseError
from rose.utils.extras import missing_package

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
SUGGESTION_LIKENESS = 0.55
"""Ratio of difflib above which a known name is offered; guessed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command lives and what `rose --help` says of it without importing it."""

    target: str
    """module:attribute, a click command."""
    summary: str


COMMANDS: dict[str, Entry] = {
    "serve": Entry("rose.cli.serve:serve", "Start the engine and the HTTP server for a model."),
    "demo": Entry(
        "rose.cli.demo:demo", "Serve, ask one question that takes a tool, show the cost."
    ),
    "chat": Entry("rose.cli.chat:chat", "Talk to a running server from the terminal."),
    "harmony": Entry("rose.cli.harmony:harmony", "Render and parse the Harmony format on stdin."),
    "inspect": Entry("rose.cli.inspect:inspect", "Show what a checkpoint holds and needs."),
    "convert": Entry("rose.cli.convert:convert", "Convert a checkpoint to another format."),
    "synth": Entry("rose.cli.synth:synth", "Write a synthetic checkpoint with real shapes."),
    "bench": Entry("rose.cli.bench:bench", "Measure prefill and decode on synthetic weights."),
    "eval": Entry("rose.cli.eval:evaluate", "Ask held-out questions and score the answers."),
    "cost": Entry("rose.cli.cost:cost", "Price tokens: latency x GPUs x dollars per hour."),
    "kernels": Entry("rose.cli.kernels:kernels", "List, explain, check and time kernels."),
    "env": Entry("rose.cli.env:env", "Print versions, devices and usable kernels."),
}


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is called."""

    def __init__(self, *, entries: dict[str, Entry], **attributes: object) -> None:
        super().__init__(**attributes)  # type: ignore[arg-type]
        self._entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table, leaving out what is not in this build."""
        return [name for name, entry in self._entries.items() if _exists(entry)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command; None where the name is not in the table."""
        entry = self._entries.get(cmd_name)
        if entry is None or not _exists(entry):
            return None
        module_name, attribute = entry.target.split(":")
        return getattr(importlib.import_module(module_name), attribute)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; an unknown name is answered with the names like it."""
        name = args[0]
        if name not in self.list_commands(ctx) and not name.startswith("-"):
            known = self.list_commands(ctx)
            near = difflib.get_close_matches(name, known, cutoff=SUGGESTION_LIKENESS)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            ctx.fail(f"{hint}there is no command {name!r}; known: {', '.join(known)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table itself, so that help imports no command."""
        rows = [(name, self._entries[name].summary) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _exists(entry: Entry) -> bool:
    return importlib.util.find_spec(entry.target.split(":")[0]) is not None


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("rose-engine")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def _print_version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        click.echo(f"rose {_version()}")
        ctx.exit()


def _with_dashes(name: str) -> str:
    # click hands over the name without its leading dashes.
    return name.replace("_", "-")


@click.group(
    cls=LazyGroup,
    entries=COMMANDS,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": _with_dashes,
        "max_content_width": 110,
    },
    help="rose: an inference engine for gpt-oss-20b and gpt-oss-120b.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and exit.",
)
def cli() -> None:
    """Hold the sub-commands."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0 done, 2 a mistake of the user's, 130 interrupted."""
    try:
        # standalone_mode off: click would print usage blocks and choose exit codes of its own.
        words = None if arguments is None else list(arguments)
        result = cli.main(args=words, prog_name="rose", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return EXIT_USER_ERROR
    except click.ClickException as error:
        return _fail(_usage_text(error))
    except RoseError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        text = missing_package("this command", error)
        if text is None:
            raise
        return _fail(text)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # `rose ... | head`: the reader has enough; devnull keeps Python from complaining at exit.
        sys.stdout = None  # type: ignore[assignment]
        return 0
    except OSError as error:
        if error.filename is None:  # no path that was named
            raise
        return _fail(str(error))
    return result if isinstance(result, int) else 0


def _usage_text(error: click.ClickException) -> str:
    text = error.format_message()
    context = getattr(error, "ctx", None)
    if context is not None and isinstance(error, click.UsageError):
        text = f"{text.rstrip('.')}; see {context.command_path} --help"
    return text


def _fail(message: str) -> int:
    lines = message.splitlines() or ["unknown"]
    for line in lines:
        click.echo(f"error: {line}", err=True)
    return EXIT_USER_ERROR


def main() -> NoReturn:
    """Run the command line of this process."""
    sys.exit(run())


if __name__ == "__main__":
    main()
