"""Formatters by name; adding one is a file and a line here (docs/add_a_formatter.md)."""

from __future__ import annotations

from collections.abc import Callable

from rose.frontend.formatters.base import Formatter
from rose.frontend.formatters.harmony.formatter import HarmonyFormatter
from rose.frontend.formatters.plain import PlainFormatter
from rose.frontend.formatters.tokens import TokensFormatter
from rose.frontend.tokenizer import Tokenizer
from rose.utils.errors import ConfigError

FORMATTERS: dict[str, Callable[[Tokenizer], Formatter]] = {
    HarmonyFormatter.name: HarmonyFormatter,
    PlainFormatter.name: PlainFormatter,
    TokensFormatter.name: lambda _: TokensFormatter(),
}


def build_formatter(name: str, tokenizer: Tokenizer) -> Formatter:
    """Return the formatter of that name for a vocabulary.

    Raises   ConfigError for an unknown name, CheckpointError when the vocabulary lacks a control token it needs
    """
    if name not in FORMATTERS:
        raise ConfigError(
            f"formatter={name!r} is not known; allowed: {', '.join(FORMATTERS)}; change --formatter"
        )
    return FORMATTERS[name](tokenizer)
