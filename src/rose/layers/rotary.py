"""The table of rotary angles with YaRN scaling, made once and shared by all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN without truncation: its bounds are not rounded to whole frequencies.

    Units    theta: base of the frequencies; factor: context over original context; beta_fast, beta_slow:
             turns over the original context above which a frequency is kept, below which it is divided
    Source   YaRN (arXiv 2309.00071), sections 3.2 to 3.4; gpt-oss model card
    """

    head_dim: int
    theta: float
    factor: float
    original_tokens: int
    beta_fast: float
    beta_slow: float

    @property
    def concentration(self) -> float:
        """What cos and sin are multiplied by."""
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def bound(self, turns: float) -> float:
        """Return the (fractional) index of the frequency that turns so often over the original context."""
        angle = self.original_tokens / (turns * 2 * math.pi)
        return self.head_dim / 2 * math.log(angle) / math.log(self.theta)

    def frequencies(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return [D / 2], radians per position, every step computed in `dtype`."""
        pair = torch.arange(0, self.head_dim, 2, dtype=dtype)
        turn = self.theta ** (pair / self.head_dim)
        if self.factor <= 1:
            return 1 / turn
        low, high = self.bound(self.beta_fast), self.bound(self.beta_slow)
        kept_share = 1 - ((pair / 2 - low) / (high - low)).clamp(0, 1)
        return (1 / (self.factor * turn)) * (1 - kept_share) + (1 / turn) * kept_share

    def table(
        self, num_positions: int, *, dtype: torch.dtype, device: str | torch.device
    ) -> Tensor:
        """Return [P, D]: cos in the first half of the columns, sin in the other, both concentrated.

        Frequencies and angles are float32 numbers also where the table is wider. That puts a far angle off by
        up to 1e-7 times the position, but it is what the published implementations compute, to the bit, and
        with it the engine gives their logits at position 100,000 too. Computed on the CPU, so that it has the
        same bits on every device.
        """
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = torch.outer(positions, self.frequencies(torch.float32)).to(dtype)
        table_PD = torch.cat([angles.cos(), angles.sin()], dim=-1) * self.concentration
        return table_PD.to(device)
