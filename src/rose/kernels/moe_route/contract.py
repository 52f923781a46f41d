"""The router: logits, the best K experts of each token, and their weights."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.registry import FormatNames, Operation, Sizes
from rose.kernels.weights import LinearWeights


def moe_route(
    x_TD: Tensor, *, weights: LinearWeights, expert_ids_TK: Tensor, expert_weights_TK: Tensor
) -> None:
    """Choose experts by logit and weigh them by a softmax over the chosen logits only.

    Shapes   T tokens, D hidden size, E experts, K chosen per token
             x_TD              activation dtype, contiguous
             weights           matrix [E, D] and bias_N [E], activation dtype or float32
             expert_ids_TK     int32, best first; equal logits: the lower id first
             expert_weights_TK activation dtype: the softmax is taken in float32 and rounded once, so bf16
                               in production
    Aliasing writes expert_ids_TK and expert_weights_TK
    Source   models/gpt_oss/reference.py. Logits are float32 sums of activation-dtype products, not rounded.
    """


def _validate(_formats: FormatNames, sizes: Sizes) -> list[str]:
    if not 1 <= sizes["K"] <= sizes["E"]:
        return [f"{sizes['K']} experts per token of {sizes['E']}; allowed: 1..{sizes['E']}"]
    return []


OPERATION = Operation(
    name="moe_route",
    signature=moe_route,
    sizes=("D", "E", "K"),
    outputs=("expert_ids_TK", "expert_weights_TK"),
    formats=("activation",),
    validate=_validate,
)
