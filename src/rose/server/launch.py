"""How to start the engine's process. Imports no torch, so that whoever supervises stays small."""

from __future__ import annotations

import sys

import msgspec

from rose.config.engine import EngineConfig
from rose.utils.errors import ConfigError


def engine_command(
    config: EngineConfig, address: str, *, stop_with_parent: bool = True, log_level: str = "INFO"
) -> list[str]:
    """Return the command line of an engine that serves `address`; for subprocess.Popen.

    Units    stop_with_parent: the engine ends when the process that started it is gone
    """
    command = [sys.executable, "-m", "rose.server.main", "--channel", address]
    command += ["--config", msgspec.json.encode(config).decode(), "--log-level", log_level]
    return [*command, "--stop-with-parent"] if stop_with_parent else command


def read_config(text: str) -> EngineConfig:
    """Return the configuration in a JSON text, as `engine_command` writes it.

    Raises  ConfigError
    """
    try:
        values = msgspec.json.decode(text)
        unknown = _unknown_fields(values, msgspec.to_builtins(EngineConfig(model="")))
        if unknown:
            raise ConfigError(
                [f"--config has an unknown field {name}; remove it" for name in unknown]
            )
        return msgspec.convert(values, EngineConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"--config cannot be read: {error}; needed: an EngineConfig as JSON; use `rose serve`"
        ) from None


def _unknown_fields(values: object, known: dict, prefix: str = "") -> list[str]:
    if not isinstance(values, dict):
        return []
    found = []
    for name, value in values.items():
        if name not in known:
            found.append(prefix + name)
        elif isinstance(known[name], dict) and name != "only":
            found += _unknown_fields(value, known[name], f"{prefix}{name}.")
    return found
