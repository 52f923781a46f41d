"""What a layer may ask of the ranks that share its weights."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ParallelGroup(Protocol):
    """An ordered set of ranks; `rank` is this process's place among `size`."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the group; may be `x` itself, changed in place."""
        ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the parts of all ranks, concatenated along `dim` in rank order."""
        ...
