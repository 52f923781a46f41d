"""Which decoder produces tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingConfig:
    """A decoder by its registry name; its numbers join here as decoders come."""

    decoder: str = "plain"
    """plain; more in decoders/registry.py."""
