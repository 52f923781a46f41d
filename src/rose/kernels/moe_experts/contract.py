"""The experts of one layer: gate_up, clamped SwiGLU, down, weighted sum over the chosen experts."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.registry import Operation
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
    """Run each token through its experts and add their weighted outputs.

    Shapes   T tokens, K experts per token, E experts held here, D hidden size, I intermediate size
             x_TD               activation dtype, contiguous
             expert_ids_TK      int32 in 0..E-1; -1: the expert lives elsewhere and adds nothing
             expert_weights_TK  activation dtype
             weights            see ExpertWeights; gate and up rows are interleaved
             out_TD             activation dtype, contiguous
    Units    gate = min(gate, limit); up = clamp(up, -limit, limit); a = gate sigmoid(alpha gate) (up + 1)
    Aliasing writes out_TD; workspace as in attention_decode. The order of the sum over K is fixed (k = 0
             first), so that results do not depend on the batch.
    Source   models/gpt_oss/reference.py. y_k = W2 a + b2, out = sum_k weight_k y_k in float32, one rounding
    """


OPERATION = Operation(
    name="moe_experts",
    signature=moe_experts,
    sizes=("D", "I", "E", "K"),
    outputs=("out_TD",),
    formats=("activation", "weight"),
)
