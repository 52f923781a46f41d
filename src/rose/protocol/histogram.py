"""Distributions that the engine counts and the frontend publishes: bounds that both know, counts that travel."""

from __future__ import annotations

import msgspec

STEP_SECONDS = (
    *(0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0),
)
"""Steps and tokens of gpt-oss on an H200 take single milliseconds: the bounds begin well below one."""
REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0),
)
STEP_TOKENS = tuple(float(1 << n) for n in range(15))

BOUNDS: dict[str, tuple[float, ...]] = {
    "step_seconds_prefill": STEP_SECONDS,
    "step_seconds_decode": STEP_SECONDS,
    "step_seconds_mixed": STEP_SECONDS,
    "step_tokens": STEP_TOKENS,
    "request_grammar_seconds": REQUEST_SECONDS,
    "request_queue_seconds": REQUEST_SECONDS,
    "request_prefill_seconds": REQUEST_SECONDS,
    "request_decode_seconds": REQUEST_SECONDS,
    "request_inference_seconds": REQUEST_SECONDS,
    "request_time_per_output_token_seconds": STEP_SECONDS,
}
"""Name -> upper bounds of the buckets; one more bucket takes what is larger."""


class Buckets(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How often values fell into each bucket since start."""

    counts: list[int]
    """One per bound, and one for what is larger."""
    total: float
    """Sum of the values."""
