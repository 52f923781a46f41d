"""`rose kernels`: the kernel frame's own command line, handed on unchanged, with what a server would resolve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rose.kernels.__main__ import Served
    from rose.utils.device import DeviceFacts


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def kernels(arguments: tuple[str, ...]) -> int:
    """List, explain, check and time kernels (needs torch)."""
    from rose.kernels.__main__ import main

    return main(arguments, prog="rose kernels", served=served)


def served(device: DeviceFacts) -> Served:
    """Return what `rose serve` resolves on a device where no option is given."""
    from rose.config.engine import EngineConfig
    from rose.kernels.__main__ import Served

    config = EngineConfig(model="", device=device.kind)
    config = config.resolve(device, checkpoint_format="mxfp4")
    return Served(
        formats={"activation": config.quant.activations, "kv": config.quant.kv},
        is_batch_invariant=bool(config.kernels.batch_invariant),
    )
