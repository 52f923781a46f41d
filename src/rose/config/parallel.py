"""How a model is spread over GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from rose.utils.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Sizes of the mesh axes; 1 everywhere means one device."""

    tp: int = 1
    """Ranks that share each projection and each attention head group; only 1 is served yet."""
    ep: int = 1
    """Ranks that share the experts; only 1 is served yet."""
    dp: int = 1
    """Replicas of the attention side; only 1 is served yet."""

    def __post_init__(self) -> None:
        wrong = [
            f"{n}={v}; allowed: 1 or more; change parallel.{n}"
            for n, v in (("tp", self.tp), ("ep", self.ep), ("dp", self.dp))
            if v < 1
        ]
        if wrong:
            raise ConfigError(wrong)
