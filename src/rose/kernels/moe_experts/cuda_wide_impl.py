"""MXFP4 experts for long steps on Hopper where no FP8 copy is kept: both products in tiles of 256 tokens."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.formats import FP8_SWIGLU, FP8_TOKEN
from rose.kernels.moe_experts import cuda_swapped_impl
from rose.kernels.moe_experts.cuda_fused_impl import COPY_MAX_EXPERTS
from rose.kernels.moe_experts.cuda_fused_impl import size_limits as rows_limits
from rose.kernels.moe_experts.cuda_wide import WideLibrary, run_experts, size_limits, workspace
from rose.kernels.moe_experts.swapped_tables import OffsetExperts, with_offsets
from rose.kernels.registry import LONG_STEP, MAX_ROWS, Band, Implementation, Sizes, register

LIBRARY = WideLibrary(fused=cuda_swapped_impl.LIBRARY.fused)
LATE_READS = {
    "wide7productINS1_4PlanILb": (
        14,
        "at a named barrier of a tile's end, 14 widths: its place (down) or biases (gate-up), which ordinary stores "
        "write and no copy; they are used before the tile's end is given back",
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
        # On an H200, 128 experts: 2,048 tokens take 905 us (cuda_swapped 890), 8,192 1898 (2676), 32,768 6480 (9662).
        rows=(LONG_STEP, MAX_ROWS),
        limits=_limits,
        prepare=with_offsets,
        workspace=workspace,
        activation_rounding=(FP8_TOKEN.name, FP8_SWIGLU.name),
        library=LIBRARY,
        note="FP8 products in tiles of 256 tokens, one scale for all columns; weights and tables of cuda_swapped",
    )
)
