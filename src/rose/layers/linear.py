"""Projections: replicated, or cut over the ranks of a group by columns or by rows of the product."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.weights import LinearWeights
from rose.layers.build import LayerBuild
from rose.layers.context import ForwardContext

SPLITS = ("none", "columns", "rows")
"""columns: each rank has some outputs; rows: some inputs, and the outputs are summed over the group."""


class Linear:
    """x W^T + b on this rank's part of W.

    Shapes   weights [N, K] of this rank. With split="rows" only rank 0 has a bias: it is added before the
             sum over the group.
    """

    def __init__(self, weights: LinearWeights, *, build: LayerBuild, split: str = "none") -> None:
        assert split in SPLITS, f"split {split!r}; allowed: {SPLITS}"
        self.num_out, num_in = weights.matrix.shape
        self._group = build.group if split == "rows" else None
        self._dtype = build.dtype
        self._gemm = build.bind(
            "gemm", sizes={"N": self.num_out, "K": num_in}, weight=weights.matrix.format.name
        )
        build.weight_bytes += self._gemm.prepare(weights)

    def forward(self, x_TK: Tensor, context: ForwardContext) -> Tensor:
        """Return [T, N] in the activation dtype."""
        out_TN = torch.empty(len(x_TK), self.num_out, dtype=self._dtype, device=x_TK.device)
        gemm = self._gemm.select(context.phase, len(x_TK))
        gemm(x_TK, residual_TN=None, out_TN=out_TN)
        return out_TN if self._group is None else self._group.all_reduce(out_TN)
