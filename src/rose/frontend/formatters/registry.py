"""Formatters by name; adding one is a file and a line here (docs/add_a_formatter.md)."""

from __future__ import annotations

from rose.frontend.formatters.base import Formatter
from rose.frontend.formatters.harmony.formatter import HarmonyFormatter
from rose.frontend.formatters.plain import PlainFormatter
from rose.frontend.formatters.tokens import TokensFormatter
from rose.frontend.tokenizer import Tokenizer
from rose.utils.errors import ConfigError

NAMES = ("harmony", "plain", "tokens")


def build_formatter(name: str, tokenizer: Tokenizer) -> Formatter:
    """Return the formatter of that name for a vocabulary.

    Raises   ConfigError for an unknown name, CheckpointError when the vocabulary lacks a control token it needs
    """
    if name == HarmonyFormatter.name:
        return HarmonyFormatter(tokenizer)
    if name == PlainFormatter.name:
        return PlainFormatter(tokenizer)
    if name == TokensFormatter.name:
        return TokensFormatter()
    raise ConfigError(f"formatter {name!r} is not known; allowed: {', '.join(NAMES)}; choose one")
