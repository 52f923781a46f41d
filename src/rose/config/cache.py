"""How the KV cache is cut into pages."""

from __future__ import annotations

from dataclasses import dataclass

from rose.utils.errors import ConfigError
from rose.utils.math import is_power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Pages hold the same number of tokens in every layer; each layer kind has a pool of its own."""

    page_tokens: int = 64
    """Tokens of a page: 16, 32, 64, 128 or 256. Beginnings of prompts are shared in whole pages."""
    memory_fraction: float = 0.9
    """Of the device memory, for weights, workspace and KV together (CUDA)."""
    kv_tokens: int | None = None
    """Tokens of KV to hold in full-attention layers; None: what memory_fraction leaves (CPU: 32768)."""
    prefix_cache: bool = True
    """Keep full pages of ended sequences for prompts that begin alike, until their memory is needed."""

    def __post_init__(self) -> None:
        problems = []
        if not is_power_of_two(self.page_tokens) or not 16 <= self.page_tokens <= 256:
            problems.append(
                f"page_tokens={self.page_tokens}; allowed: 16, 32, 64, 128, 256; change cache.page_tokens"
            )
        if not 0.05 <= self.memory_fraction <= 0.98:
            problems.append(
                f"memory_fraction={self.memory_fraction}; allowed: 0.05 to 0.98; change cache.memory_fraction"
            )
        if self.kv_tokens is not None and self.kv_tokens < self.page_tokens:
            problems.append(
                f"kv_tokens={self.kv_tokens} is less than one page of {self.page_tokens}; change cache.kv_tokens"
            )
        if problems:
            raise ConfigError(problems)
