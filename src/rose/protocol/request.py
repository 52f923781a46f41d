"""What travels from the frontend to the engine: requests and aborts, in tokens only."""

from __future__ import annotations

import msgspec

from rose.protocol.sampling_params import SamplingParams

MAX_SALT_CHARACTERS = 256


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
    cache_salt: str = ""
    """Requests share cached prefixes only with those of the same salt, so that the time to a first token tells
    nobody what another tenant has asked."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort", forbid_unknown_fields=True):
    """Stop a request within one step; unknown ids are ignored (it may just have finished)."""

    request_id: str


class StatusQuery(msgspec.Struct, frozen=True, kw_only=True, tag="status_query"):
    """Ask the engine for an EngineStatus event."""


ToEngine = Request | Abort | StatusQuery
