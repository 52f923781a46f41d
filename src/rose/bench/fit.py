"""Whether a cell of a sweep can run on an engine as it was built, asked before anything is measured; and the error
of one that could not be measured after all."""

from __future__ import annotations

from rose.engine.engine import LLMEngine
from rose.utils.errors import RoseError
from rose.utils.math import ceil_div


class CellError(RoseError):
    """A cell that gave no figure on this engine; the others of a sweep may."""


def refusal(engine: LLMEngine, *, sequences: int, tokens: int) -> str | None:
    """Say why so many sequences, each growing to so many tokens, cannot run side by side, or None."""
    most = engine.scheduler.config.max_sequences
    if sequences > most:
        return f"{sequences} sequences, the engine runs {most} (scheduler.max_sequences)"
    if tokens > engine.limits.context_tokens:
        return f"{tokens} tokens, the context length is {engine.limits.context_tokens}"
    table = engine.table
    page_tokens = table.layout.page_tokens
    # Admission keeps one page free for every sequence that runs.
    pages = sequences * (ceil_div(tokens, page_tokens) + 1)
    for kind in table.layout.kinds:
        held = table.pools[kind.kind].num_pages
        if kind.window_tokens is None and pages > held:
            return f"{sequences} x {tokens} tokens need {pages} pages of {page_tokens}, the KV cache has {held}"
    return None
