"""Experts for many tokens in Triton: FP8 activations against fp8_block weights.

sort by expert -> quantise and scatter -> gate-up with SwiGLU and quantisation -> down -> combine.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rose.kernels.moe_experts.triton_grouped import TileShape, down, gate_up
from rose.kernels.moe_experts.triton_permute import combine, quantize_scatter, sort_by_expert
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import ExpertWeights
from rose.utils.math import ceil_div

X_GROUP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillShapes:
    """Launch shapes of the two products; they share the height of a tile."""

    gate_up: TileShape
    down: TileShape

    @property
    def hidden_group(self) -> int:
        """Return how many SwiGLU channels share a scale: those of one run of gate-up columns."""
        return self.gate_up.block_n // 2


DEFAULT = PrefillShapes(
    gate_up=TileShape(block_m=128, block_n=128, num_stages=4, num_warps=8),
    down=TileShape(block_m=128, block_n=128, num_stages=5, num_warps=8),
)
"""Not timed against others. 128 x 256 does not go: two float32 accumulators of that size spill (255 registers)."""


def run_experts(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: ExpertWeights,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
    shapes: PrefillShapes,
) -> None:
    """The whole operation with given launch shapes."""
    if x_TD.shape[0] == 0:
        return
    interpreted = not x_TD.is_cuda
    table = sort_by_expert(
        expert_ids_TK,
        num_experts=weights.gate_up.values.shape[0],
        block_m=shapes.gate_up.block_m,
    )
    x_RD, x_scales = quantize_scatter(x_TD, table, group=X_GROUP, interpreted=interpreted)
    a_RI, a_scales = gate_up(
        x_RD, x_scales, table,
        values_EFD=weights.gate_up.values, scales=weights.gate_up.scales,
        bias_EF=weights.gate_up_bias_EF, alpha=swiglu_alpha, limit=swiglu_limit,
        x_group=X_GROUP, shape=shapes.gate_up, interpreted=interpreted,
    )  # fmt: skip
    y_RD = down(
        a_RI, a_scales, table,
        values_EDI=weights.down.values, scales=weights.down.scales, bias_ED=weights.down_bias_ED,
        a_group=shapes.hidden_group, shape=shapes.down, dtype=x_TD.dtype,
    )  # fmt: skip
    combine(y_RD, table, expert_weights_TK, out_TD=out_TD)


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
    """See the contract."""
    run_experts(
        x_TD,
        expert_ids_TK,
        expert_weights_TK,
        weights=weights,
        swiglu_alpha=swiglu_alpha,
        swiglu_limit=swiglu_limit,
        out_TD=out_TD,
        shapes=DEFAULT,
    )


def _workspace(sizes: Sizes, rows: int, _longest: int) -> int:
    pairs, hidden, inner = rows * sizes["K"], sizes["D"], sizes["I"]
    scales = 4 * pairs * (ceil_div(hidden, X_GROUP) + ceil_div(inner, DEFAULT.hidden_group))
    return pairs * (3 * hidden + inner) + scales


def _limits(sizes: Sizes) -> str | None:
    for name in ("D", "I"):
        if sizes[name] % 16:
            return f"{name} = {sizes[name]}; the copy engine takes rows of whole 16 bytes"
    if sizes["E"] > 128:
        return f"{sizes['E']} experts; the sort takes up to 128"
    return None


register(
    Implementation(
        operation="moe_experts",
        name="triton_prefill",
        function=moe_experts,
        band=Band.TUNED,
        device="cuda",
        min_capability=(9, 0),
        formats={
            "activation": frozenset({"bf16", "float32"}),
            "weight": frozenset({"fp8_block"}),
        },
        phases=frozenset({"prefill"}),
        limits=_limits,
        activation_rounding=("fp8_group128", f"fp8_group{DEFAULT.hidden_group}"),
        interpreted=frozenset({"bf16", "float32"}),
        workspace=_workspace,
        note="FP8 products, bias in the float32 accumulators",
    )
)
