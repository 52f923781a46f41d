"""Where the rows of each expert are, once the (token, k) pairs are sorted by expert.

A *row* is one pair; the rows of expert e are starts[e] .. starts[e + 1] - 1, in the order of the pairs, with no
padding between experts. A *tile* is up to `block_m` rows of one expert. All of it stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """Where the rows of each expert are.

    Shapes   T tokens, K experts per token, E experts, M tiles at most
             row_TK        int32: row of the pair, -1 where its expert lives elsewhere
             starts_E1     int32 [E + 1]: first row of each expert, then the number of rows
             tiles_E1      int32 [E + 1]: first tile of each expert, then the number of tiles
             expert_M      int32: expert of each tile; undefined past the number of tiles
    """

    row_TK: Tensor
    starts_E1: Tensor
    tiles_E1: Tensor
    expert_M: Tensor
    block_m: int

    @property
    def max_tiles(self) -> int:
        """Return the number of tiles that no routing passes."""
        return self.expert_M.shape[0]


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return how many tiles `num_pairs` rows can make: each hit expert may leave one tile short."""
    return num_pairs // block_m + min(num_experts, num_pairs)


def allocate_rows(expert_ids_TK: Tensor, *, num_experts: int, block_m: int) -> RowTable:
    """Return a table whose tensors a sort has yet to fill."""

    def integers(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=expert_ids_TK.device)

    return RowTable(
        row_TK=torch.empty_like(expert_ids_TK),
        starts_E1=integers(num_experts + 1),
        tiles_E1=integers(num_experts + 1),
        expert_M=integers(max_tiles(expert_ids_TK.numel(), num_experts, block_m)),
        block_m=block_m,
    )
