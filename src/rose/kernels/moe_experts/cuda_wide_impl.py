"""MXFP4 experts for long steps on Hopper where no FP8 copy is kept: gate-up in tiles of 256 tokens."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.moe_experts import cuda_swapped_impl
from rose.kernels.moe_experts.cuda_fused import HIDDEN_GROUP
from rose.kernels.moe_experts.cuda_fused_impl import COPY_MAX_EXPERTS
from rose.kernels.moe_experts.cuda_fused_impl import size_limits as rows_limits
from rose.kernels.moe_experts.cuda_wide import WideLibrary, run_experts, size_limits, workspace
from rose.kernels.moe_experts.swapped_tables import OffsetExperts, with_offsets
from rose.kernels.registry import LONG_STEP, MAX_ROWS, Band, Implementation, Sizes, register

LIBRARY = WideLibrary(swapped=cuda_swapped_impl.LIBRARY)
LATE_READS = {
    "wide7productINS1_4PlanILb1ELb0ELb1EEE": (
        28,
        "at the two named barriers of a tile's end, 14 widths: a tile's place and the tokens' scales, which ordinary "
        "stores write and no copy; they are used before the tile's end is given back",
    )
}
"""For `python -m rose.kernels aot`: reads not waited for and reason, by a part of the kernel's name."""


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
    if sizes["E"] <= COPY_MAX_EXPERTS:
        return f"{sizes['E']} experts; made for more than {COPY_MAX_EXPERTS}, of which no fp8 copy is kept"
    return rows_limits(sizes) or size_limits(sizes) or LIBRARY.refusal()


register(
    Implementation(
        operation="moe_experts",
        name="cuda_wide",
        function=moe_experts,
        band=Band.SPECIALISED,
        device="cuda",
        min_capability=(9, 0),
        max_capability=(9, 0),
        formats={"activation": frozenset({"bf16"}), "weight": frozenset({"mxfp4"})},
        phases=frozenset({"prefill"}),
        # On an H200, 128 experts: 2,048 tokens take 938 us (cuda_swapped 948), 8,192 2103 (2776), 32,768 7506 (9488).
        rows=(LONG_STEP, MAX_ROWS),
        limits=_limits,
        prepare=with_offsets,
        workspace=workspace,
        activation_rounding=("fp8_token", f"fp8_group{HIDDEN_GROUP}"),
        library=LIBRARY,
        note="cuda_swapped with gate-up in tiles of 256 tokens and one scale per token; the same weights and tables",
    )
)
