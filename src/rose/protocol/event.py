"""What travels from the engine to the frontend."""

from __future__ import annotations

from typing import Literal

import msgspec

from rose.protocol.histogram import Buckets

FinishReason = Literal["stop", "length", "abort"]
ErrorCode = Literal[
    "context_length_exceeded",
    "invalid_request",
    "queue_full",
    "request_timeout",
    "duplicate_request_id",
    "grammar_failed",
    "logits_not_finite",
    "engine_failed",
    "engine_unavailable",
    "shutting_down",
]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position, of the distribution as the model gave it."""

    logprob: float
    """Of the sampled token."""
    top_ids: list[int]
    """The best tokens, as many as were asked for, best first."""
    top_logprobs: list[float]


class TokensEvent(
    msgspec.Struct, frozen=True, kw_only=True, tag="tokens", gc=False, omit_defaults=True
):
    """New tokens of one request; several where a decoder accepts drafts."""

    request_id: str
    token_ids: list[int]
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache; set on the first event."""
    logprobs: list[TokenLogprobs] | None = None
    """One per token, where the request asked for them."""


class FinishedEvent(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The last event of a request that ran."""

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int


class ErrorEvent(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """The last event of a request that was refused or failed; the message is written for its user."""

    request_id: str
    code: ErrorCode
    message: str
    param: str | None = None
    """Field of the request that is at fault, where one is."""


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """State of the engine, sent when it becomes ready, on a query and about once a second."""

    is_ready: bool
    model: str
    context_tokens: int
    vocab_size: int
    num_running: int = 0
    num_waiting: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    weights_format: str = ""
    """Of experts, as they are resident; empty where there is no model."""
    kv_format: str = ""
    """Of the KV cache; likewise."""
    kv_pages_idle: int = 0
    """Pages that no sequence uses and that a later prompt can still find; part of what is free."""
    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens computed since start."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache since start."""
    num_evicted_pages: int = 0
    """Pages of all layer kinds that the prefix cache gave away since start."""
    num_output_tokens: int = 0
    """Tokens sampled since start."""
    num_waiting_tokens: int = 0
    window_pages_used: int = 0
    window_pages_total: int = 0
    """Pages of the layers with a window; the others count those of full attention."""
    num_queried_tokens: int = 0
    """Prompt tokens looked up in the prefix cache since start."""
    num_preemptions: int = 0
    num_refused: int = 0
    """Requests that found the queue full."""
    num_expired: int = 0
    """Requests whose time was up."""
    num_aborted: int = 0
    """Requests that their frontend took back."""
    num_grammar_failures: int = 0
    num_damaged: int = 0
    """Requests that ended because the model's logits were not finite."""
    num_late_kernels: int = 0
    """Compiled while serving: every running sequence waited."""
    start_s: float = 0.0
    """How long the engine took to load, measure and capture."""
    histograms: dict[str, Buckets] = {}
    """Of `histogram.BOUNDS`."""
    step_bound_s: float = 0.0
    """Most that the steps under way should take; any frame of the engine, this one included, is progress."""
    vocabularies: list[str] = []
    """Keys of the vocabularies that grammars may be written for."""
    detail: str = ""
    """What the engine is doing before it is ready, or why it failed."""


FromEngine = TokensEvent | FinishedEvent | ErrorEvent | EngineStatus
