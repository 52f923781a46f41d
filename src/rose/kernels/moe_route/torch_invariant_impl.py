"""The router for the batch-invariant mode on a CPU: tiles of rows, and a softmax over the chosen in a fixed order."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.invariant import Factor, exp_, require_equal_rows, sum_columns
from rose.kernels.registry import Band, Implementation, register
from rose.kernels.weights import LinearWeights


def moe_route(
    x_TD: Tensor, *, weights: Factor, expert_ids_TK: Tensor, expert_weights_TK: Tensor
) -> None:
    """As the reference: the lower id first among equals."""
    best_TE, ids_TE = weights.times(x_TD).sort(dim=-1, descending=True, stable=True)
    num_chosen = expert_ids_TK.shape[1]
    expert_ids_TK.copy_(ids_TE[:, :num_chosen])
    e_TK = exp_(best_TE[:, :num_chosen] - best_TE[:, :1])
    expert_weights_TK.copy_(e_TK / sum_columns(e_TK))


def _prepare(weights: LinearWeights) -> Factor:
    return require_equal_rows(Factor.of(weights.matrix.to_float(), weights.bias_N))


register(
    Implementation(
        operation="moe_route",
        name="torch_invariant",
        function=moe_route,
        band=Band.PORTABLE,
        device="cpu",
        formats={"activation": frozenset({"float32", "bf16"})},
        prepare=_prepare,
        is_batch_invariant=True,
        note="tiles of 8 rows",
    )
)
