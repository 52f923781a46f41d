"""The output head: chosen hidden rows to float32 logits over the whole vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.weights import LinearWeights
from rose.layers.build import LayerBuild


class LmHead:
    """A projection whose result stays float32 (wider where activations are).

    Shapes   weights [V / ranks, D], no bias; the parts of all ranks are gathered
    """

    def __init__(self, weights: LinearWeights, *, build: LayerBuild) -> None:
        self._num_rows, hidden = weights.matrix.shape
        self._group = build.group
        self._dtype = torch.float64 if build.dtype == torch.float64 else torch.float32
        self._gemm = build.bind(
            "gemm", sizes={"N": self._num_rows, "K": hidden}, weight=weights.matrix.format.name
        )
        build.weight_bytes += self._gemm.prepare(weights)

    def forward(self, hidden_SD: Tensor) -> Tensor:
        """Return logits [S, V]. Each row is some sequence's newest, so it counts as a decode step."""
        num_rows = len(hidden_SD)
        out_SV = torch.empty(num_rows, self._num_rows, dtype=self._dtype, device=hidden_SD.device)
        if num_rows:
            self._gemm.select("decode", num_rows)(hidden_SD, residual_TN=None, out_TN=out_SV)
        return out_SV if self._group.size == 1 else self._group.all_gather(out_SV, dim=-1)
