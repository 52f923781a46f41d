"""The experts for the batch-invariant mode on a CPU: each expert's rows in tiles of a fixed number, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rose.kernels.formats import FormattedTensor
from rose.kernels.invariant import MOST_WIDENED, TILE_ROWS, Factor, exp_, require_equal_rows
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import ExpertWeights
from rose.utils.math import round_up


@dataclass(frozen=True, slots=True)
class ExpertFactors:
    """The experts, widened, one by one."""

    gate_up: tuple[Factor, ...]
    down: tuple[Factor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(f.num_bytes for f in (*self.gate_up, *self.down))

    def expert(self, e: int) -> tuple[Factor, Factor]:
        """Return gate_up and down of an expert."""
        return self.gate_up[e], self.down[e]


def moe_experts(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: ExpertWeights | ExpertFactors,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
) -> None:
    """Sort the (token, k) pairs by expert, fill each expert's last tile up, add the outputs in order of k."""
    num_tokens, num_chosen = expert_ids_TK.shape
    id_P, order_P = expert_ids_TK.flatten().sort(stable=True)
    # Experts of other ranks, -1, are a run of their own, whose outputs stay zeros.
    counts = (id_P + 1).bincount().tolist()
    sizes = [round_up(count, TILE_ROWS) for count in counts]
    runs = [
        (e - 1, end - size, end)
        for e, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True))
        if size and e
    ]
    # A pair's row: where its run begins, and how many pairs of the run come before it.
    moved = [end - size for size, end in zip(sizes, accumulate(sizes), strict=True)]
    shift = [to - (end - n) for to, n, end in zip(moved, counts, accumulate(counts), strict=True)]
    sorted_row_P = torch.arange(len(id_P)) + torch.tensor(shift)[(id_P + 1).long()]
    x_RD = torch.zeros(sum(sizes), x_TD.shape[1])
    x_RD.index_copy_(0, sorted_row_P, x_TD.float().index_select(0, order_P // num_chosen))
    experts = [_expert(weights, e) for e, _, _ in runs]
    u_RF = _by_expert(x_RD, [(up, b, e) for (up, _), (_, b, e) in zip(experts, runs, strict=True)])
    a_RI = _swiglu(u_RF, alpha=swiglu_alpha, limit=swiglu_limit)
    y_RD = _by_expert(
        a_RI, [(down, b, e) for (_, down), (_, b, e) in zip(experts, runs, strict=True)]
    )
    row_P = torch.empty_like(order_P).index_copy_(0, order_P, sorted_row_P)
    y_TKD = y_RD.index_select(0, row_P).view(num_tokens, num_chosen, -1)
    y_TKD.mul_(expert_weights_TK.float().unsqueeze(-1))
    total_TD = y_TKD[:, 0]
    for k in range(1, num_chosen):
        total_TD = total_TD + y_TKD[:, k]
    out_TD.copy_(total_TD)


def _by_expert(x_RC: Tensor, runs: list[tuple[Factor, int, int]]) -> Tensor:
    """Return each run's rows times its expert's matrix; rows outside the runs, which come first, are zeros."""
    parts = [factor.times(x_RC[begin:end]) for factor, begin, end in runs]
    if runs and runs[0][1] == 0:
        return torch.cat(parts)
    num_out = parts[0].shape[1] if parts else x_RC.shape[1]
    first = runs[0][1] if runs else len(x_RC)
    return torch.cat([x_RC.new_zeros(first, num_out), *parts])


def _expert(weights: ExpertWeights | ExpertFactors, e: int) -> tuple[Factor, Factor]:
    if isinstance(weights, ExpertFactors):
        return weights.expert(e)
    gate_up, down = weights.gate_up[e].to_float(), weights.down[e].to_float()
    return (
        Factor.of(gate_up, weights.gate_up_bias_EF[e]),
        Factor.of(down, weights.down_bias_ED[e]),
    )


def _swiglu(u_RF: Tensor, *, alpha: float, limit: float) -> Tensor:
    gate_RI = u_RF[:, 0::2].clamp(max=limit)
    up_RI = u_RF[:, 1::2].clamp(-limit, limit)
    return gate_RI.div(exp_(gate_RI * -alpha).add_(1.0)).mul_(up_RI.add_(1.0))


def _prepare(weights: ExpertWeights) -> ExpertWeights | ExpertFactors:
    num_experts, twice_inner, hidden = weights.gate_up.shape
    for factor in _expert(weights, 0):
        require_equal_rows(factor)
    if num_experts * twice_inner * hidden * 3 // 2 > MOST_WIDENED:
        return weights
    return ExpertFactors(
        tuple(_factors(weights.gate_up, weights.gate_up_bias_EF)),
        tuple(_factors(weights.down, weights.down_bias_ED)),
    )


def _factors(matrix: FormattedTensor, bias_EN: Tensor) -> Iterator[Factor]:
    values_ENK = matrix.to_float()
    for e in range(len(values_ENK)):
        yield Factor.of(values_ENK[e], bias_EN[e])


def _workspace(sizes: Sizes, rows: int, _longest: int) -> int:
    hidden, inner = sizes["D"], sizes["I"]
    padded = rows * sizes["K"] + sizes["E"] * TILE_ROWS
    return 4 * (padded * (3 * hidden + 6 * inner) + 3 * hidden * inner)


register(
    Implementation(
        operation="moe_experts",
        name="torch_invariant",
        function=moe_experts,
        band=Band.PORTABLE,
        device="cpu",
        formats={"activation": frozenset({"float32", "bf16"})},
        prepare=_prepare,
        workspace=_workspace,
        is_capturable=False,
        is_batch_invariant=True,
        note="tiles of 8 rows of an expert; float32 copy of the matrices, made at load",
    )
)
