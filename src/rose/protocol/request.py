"""What travels from the frontend to the engine: requests and aborts, in tokens only."""

from __future__ import annotations

import msgspec

from rose.protocol.grammar import Constraint, Vocabulary
from rose.protocol.sampling_params import SamplingParams

MAX_SALT_CHARACTERS = 256
MAX_PRIORITY = 1_000_000
MAX_TIMEOUT_SECONDS = 86_400


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request", forbid_unknown_fields=True):
    """Generate tokens after a prompt. The engine knows no text: stop ids arrive here."""

    request_id: str
    """Unique among the running requests of the engine."""
    prompt_token_ids: list[int]
    max_tokens: int
    """Most tokens to generate; prompt + max_tokens may not pass the context length."""
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: list[int] = []
    """Any of these ends the request; the stop token is part of the output. Empty: never stop early."""
    priority: int = 0
    """Smaller runs sooner, where the engine orders by priority."""
    timeout_s: float | None = None
    """Seconds from its arrival at the engine after which it ends with request_timeout, waiting or running."""
    cache_salt: str = ""
    """Requests share cached prefixes only with those of the same salt, so that the time to a first token tells
    nobody what another tenant has asked."""
    constraint: Constraint | None = None
    """Grammars that the output obeys; None: every token is free."""


def problems_of_limits(*, priority: int, timeout_s: float | None) -> list[str]:
    """Return what is out of range, in the words of the API."""
    problems = []
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        problems.append(
            f"priority={priority}; allowed: {-MAX_PRIORITY} to {MAX_PRIORITY}, smaller runs sooner"
        )
    if timeout_s is not None and not 0 < timeout_s < MAX_TIMEOUT_SECONDS:
        problems.append(
            f"timeout={timeout_s}; allowed: above 0, below {MAX_TIMEOUT_SECONDS} seconds"
        )
    return problems


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort", forbid_unknown_fields=True):
    """Stop a request within one step; unknown ids are ignored (it may just have finished)."""

    request_id: str


class StatusQuery(msgspec.Struct, frozen=True, kw_only=True, tag="status_query"):
    """Ask the engine for an EngineStatus event."""


ToEngine = Request | Abort | StatusQuery | Vocabulary
