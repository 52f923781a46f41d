"""The router by its formula, in float32 (float64 stays float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.weights import LinearWeights


def reference(
    x_TD: Tensor, *, weights: LinearWeights, expert_ids_TK: Tensor, expert_weights_TK: Tensor
) -> None:
    """Sort all logits, keep the first K, softmax over those; see the contract."""
    wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    logits_TE = x_TD.to(wide) @ weights.matrix.to_float(wide).T
    if weights.bias_N is not None:
        logits_TE += weights.bias_N.to(wide)
    # A stable sort keeps the lower id first among equals; topk promises no order.
    best_TE, ids_TE = logits_TE.sort(dim=-1, descending=True, stable=True)
    num_chosen = expert_ids_TK.shape[1]
    expert_ids_TK.copy_(ids_TE[:, :num_chosen])
    expert_weights_TK.copy_(best_TE[:, :num_chosen].softmax(dim=-1))
