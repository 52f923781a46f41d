"""How a request wants its tokens chosen."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers that steer sampling; `problems` checks them, nothing is clamped silently."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    seed: int | None = None
    """None: the engine draws one. Equal seeds give equal tokens whatever shares the batch."""

    def problems(self) -> list[str]:
        """Return every field out of range, as asked / allowed."""
        checks = (
            (
                0.0 <= self.temperature <= 100.0,
                f"temperature={self.temperature}; allowed: 0 to 100",
            ),
            (0.0 < self.top_p <= 1.0, f"top_p={self.top_p}; allowed: above 0, at most 1"),
            # more than 64 bits cannot travel to the engine
            (
                0 <= self.top_k < 2**63,
                f"top_k={self.top_k}; allowed: 0 (all) to {2**63 - 1}",
            ),
            (0.0 <= self.min_p <= 1.0, f"min_p={self.min_p}; allowed: 0 to 1"),
            (
                self.seed is None or -(2**63) <= self.seed < 2**63,
                f"seed={self.seed}; allowed: a signed 64-bit integer",
            ),
        )
        return [text for is_right, text in checks if not is_right]
