"""MXFP4 experts for many tokens on Hopper where no FP8 copy is kept: the weights are expanded into registers.

In long steps of the 120b cuda_wide_impl.py is bound.
"""

from __future__ import annotations

from torch import Tensor

from rose.kernels.moe_experts.cuda_fused import HIDDEN_GROUP, X_GROUP, workspace
from rose.kernels.moe_experts.cuda_fused_impl import size_limits
from rose.kernels.moe_experts.cuda_swapped import SwappedLibrary, run_experts
from rose.kernels.moe_experts.swapped_tables import OffsetExperts, with_offsets
from rose.kernels.registry import Band, Implementation, Sizes, register

LIBRARY = SwappedLibrary()
_FULL = "totals, sums of a piece and both slabs' operand fill 240 registers: two to four numbers a stage are put away"
SPILLS = {
    "swapped7productINS1_4PlanILb1": (76, _FULL),
    "swapped7productINS1_4PlanILb0": (44, _FULL),
}
"""For `python -m rose.kernels aot`: bytes and reason, by a part of the kernel's name (gate-up, down)."""


def moe_experts(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: OffsetExperts,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
) -> None:
    """See the contract."""
    run_experts(
        LIBRARY,
        x_TD,
        expert_ids_TK,
        expert_weights_TK,
        weights=weights,
        swiglu_alpha=swiglu_alpha,
        swiglu_limit=swiglu_limit,
        out_TD=out_TD,
    )


def _limits(sizes: Sizes) -> str | None:
    return size_limits(sizes) or LIBRARY.library.refusal() or LIBRARY.fused.library.refusal()


register(
    Implementation(
        operation="moe_experts",
        name="cuda_swapped",
        function=moe_experts,
        band=Band.TUNED,
        device="cuda",
        min_capability=(9, 0),
        max_capability=(9, 0),
        formats={"activation": frozenset({"bf16"}), "weight": frozenset({"mxfp4"})},
        phases=frozenset({"prefill"}),
        limits=_limits,
        prepare=with_offsets,
        workspace=workspace,
        activation_rounding=(f"fp8_group{X_GROUP}", f"fp8_group{HIDDEN_GROUP}"),
        library=LIBRARY,
        note="FP8 products, mxfp4 expanded into registers, exact where exponents of 128 rows span at most 14",
    )
)
