"""Sizes that every decoder model has; each model's own configuration extends it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the engine, the cache and the memory plan need to know of any model."""

    architecture: str
    vocab_size: int
    """Rows of the embedding; sampled ids are below it."""
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    context_tokens: int
    """Most positions of one sequence."""
    window_tokens: tuple[int | None, ...]
    """Per layer: tokens seen by the attention, itself included; None is all."""
    eos_token_ids: tuple[int, ...] = ()
