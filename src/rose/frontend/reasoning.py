"""Who sees how the model thought: the one place that decides it, for every API.

visible: reasoning is part of the answer. hidden: it is generated and counted, and no text of it leaves the server.
debug: every message comes as the model wrote it, with channel and recipient, beside the usual answer. The server's
mode is what a request gets that asks for none; where it is hidden, no request can lift it. Knows no API.
"""

from __future__ import annotations

from typing import Literal, get_args

from rose.frontend.errors import RequestError
from rose.frontend.formatters.base import Delta

ReasoningMode = Literal["visible", "hidden", "debug"]
MODES: tuple[str, ...] = get_args(ReasoningMode)

SHOWN_KINDS = ("content", "tool_call", "tool_arguments", "item")
"""What is sent where reasoning is hidden; an item says that there is reasoning and nothing of what it is."""


def resolve_mode(
    server: ReasoningMode, asked: str | None, *, include: bool | None = None
) -> ReasoningMode:
    """Return the mode of one request: `asked` is its `reasoning_mode`, `include` its `include_reasoning`.

    Raises  RequestError for an unknown mode, for two fields that contradict each other, and for more than a server
            that hides reasoning shows.
    """
    if asked is not None and asked not in MODES:
        raise _refusal(
            "invalid_request", f"reasoning_mode={asked[:80]!r}; allowed: {', '.join(MODES)}"
        )
    if include is False and asked not in (None, "hidden"):
        raise _refusal(
            "invalid_request",
            f"reasoning_mode={asked} was given with include_reasoning=false; leave one of them out",
        )
    if server == "hidden" and asked not in (None, "hidden"):
        raise _refusal(
            "unsupported_value",
            f"reasoning_mode={asked}: this server hides reasoning (--reasoning hidden); allowed: hidden; "
            "leave it out",
        )
    if server == "hidden" or include is False:
        return "hidden"
    return server if asked is None else asked  # type: ignore[return-value]


def shown(deltas: list[Delta], mode: ReasoningMode) -> list[Delta]:
    """Return what may leave the server of some deltas. What is left out here is nowhere else to be found."""
    if mode != "hidden":
        return deltas
    return [delta for delta in deltas if delta.kind in SHOWN_KINDS]


def require_open_tokens(server: ReasoningMode, route: str) -> None:
    """Refuse a route that returns text or tokens as they were sampled, where reasoning is hidden.

    Raises  RequestError
    """
    if server == "hidden":
        raise RequestError(
            "permission_denied",
            f"{route} returns what was sampled as it was sampled, reasoning included, and this server hides "
            "reasoning (--reasoning hidden); use /v1/chat/completions",
        )


def _refusal(code: str, message: str) -> RequestError:
    return RequestError(code, message, param="reasoning_mode")
