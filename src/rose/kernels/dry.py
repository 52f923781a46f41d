"""A bound operation that computes nothing: it only takes and gives back the memory that a call would take.

With weights on torch's meta device a whole model runs so in milliseconds and without memory, which is how the memory
plan learns what a step needs before any weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rose.kernels.registry import BoundOperation, Implementation


class DryOperation(BoundOperation):
    """The table of `bound`, with calls that write nothing."""

    def __init__(
        self, bound: BoundOperation, longest: int, known_bytes: dict[tuple[Any, ...], int]
    ) -> None:
        """`longest`: tokens of the longest sequence; `known_bytes` remembers what relayouts hold: layers are alike."""
        super().__init__(bound.operation, bound.table, sizes=bound.sizes)
        self._longest = longest
        self._known_bytes = known_bytes
        self._calls = {r: self._dry(i) for r, i in bound.table.items()}

    def prepare(self, weights: Any) -> int:
        """Relayout weights without memory; return the bytes that would be held."""
        key = (*(i.prepare for i in self.table.values()), weights.num_bytes, *self.sizes.items())
        if key not in self._known_bytes:
            self._known_bytes[key] = super().prepare(weights)
            self._calls = {r: self._dry(i) for r, i in self.table.items()}
        return self._known_bytes[key]

    def _dry(self, implementation: Implementation) -> Callable[..., None]:
        def call(first: Tensor, *_: Any, **__: Any) -> None:
            # The first operand of every contract has a row per token.
            num_bytes = implementation.workspace(self.sizes, len(first), self._longest)
            torch.empty(num_bytes, dtype=torch.uint8, device="meta")

        return call
