"""`rose kernels`: the kernel frame's own command line, handed on unchanged."""

from __future__ import annotations

import click


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def kernels(arguments: tuple[str, ...]) -> int:
    """List, explain, check and time kernels (needs torch)."""
    from rose.kernels.__main__ import main

    return main(arguments, prog="rose kernels")
