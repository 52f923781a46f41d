"""The experts with torch operators: runs anywhere, one loop over the experts that were hit.

Asks the device which experts those are, so it cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.moe_experts.reference import swiglu
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import ExpertWeights


def moe_experts(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: ExpertWeights,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
) -> None:
    """Sort the (token, k) pairs by expert, run each expert over its rows, add them back in order of k."""
    num_tokens, num_chosen = expert_ids_TK.shape
    wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    order_M = expert_ids_TK.flatten().argsort(stable=True)
    hit, counts = expert_ids_TK.flatten().unique(return_counts=True)
    x_MD = x_TD.to(wide)[order_M // num_chosen]
    y_MD = torch.zeros_like(x_MD)
    begin = 0
    for e, count in zip(hit.tolist(), counts.tolist(), strict=True):
        rows = slice(begin, begin + count)
        begin += count
        if e < 0:
            continue
        u_NF = torch.addmm(
            weights.gate_up_bias_EF[e].to(wide), x_MD[rows], weights.gate_up[e].to_float(wide).T
        )
        a_NI = swiglu(u_NF, alpha=swiglu_alpha, limit=swiglu_limit)
        y_MD[rows] = torch.addmm(
            weights.down_bias_ED[e].to(wide), a_NI, weights.down[e].to_float(wide).T
        )
    y_TKD = torch.empty_like(y_MD).index_copy_(0, order_M, y_MD)
    y_TKD = y_TKD.view(num_tokens, num_chosen, -1) * expert_weights_TK.to(wide).unsqueeze(-1)
    total_TD = y_TKD[:, 0]
    for k in range(1, num_chosen):  # k = 0 first, whatever the batch
        total_TD = total_TD + y_TKD[:, k]
    out_TD.copy_(total_TD)


def workspace(sizes: Sizes, rows: int, _longest: int) -> int:
    """Bytes of a call in float32: rows sorted by expert and their outputs, and all rows through one expert."""
    pairs, hidden, inner = rows * sizes["K"], sizes["D"], sizes["I"]
    matrices = 3 * inner * hidden
    return 4 * (3 * pairs * hidden + 5 * rows * inner + matrices)


register(
    Implementation(
        operation="moe_experts",
        name="torch",
        function=moe_experts,
        band=Band.PORTABLE,
        is_capturable=False,
        workspace=workspace,
        note="one loop over the experts hit; asks the device, so not for graphs",
    )
)
