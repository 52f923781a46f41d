"""Registration of the fused experts, not in force: the frame reads `*_impl.py` files only.

Once benchmarks/moe_prefill_fused.py finds no mistake on a GPU and the times are better, `git mv` this file to
cuda_fused_impl.py. With mxfp4 it then comes before cuda_prefill_expand (120b) and after cuda_prefill_copy (20b:
`kernels.only` would force it on decode too, which it refuses; raise its band to SPECIALISED instead).
"""

from __future__ import annotations

from torch import Tensor

from rose.kernels.moe_experts.cuda_fused import HIDDEN_GROUP, FusedLibrary, run_experts
from rose.kernels.moe_experts.cuda_prefill import MAX_CHOSEN, MAX_EXPERTS
from rose.kernels.moe_experts.mxfp4_tiles import TiledExperts, tiled
from rose.kernels.registry import Band, Implementation, Sizes, register

LIBRARY = FusedLibrary()


def moe_experts(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: TiledExperts,
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
    for name in ("D", "I"):
        if sizes[name] % 64:
            return f"{name} = {sizes[name]}; takes multiples of 64"
    if sizes["E"] > MAX_EXPERTS:
        return f"{sizes['E']} experts; the sort takes up to {MAX_EXPERTS}"
    if sizes["K"] > MAX_CHOSEN:
        return f"{sizes['K']} experts per token; takes up to {MAX_CHOSEN}"
    return LIBRARY.library.refusal()


def register_fused() -> None:
    """Add the implementation for mxfp4 weights."""
    register(
        Implementation(
            name="cuda_fused",
            operation="moe_experts",
            function=moe_experts,
            device="cuda",
            min_capability=(9, 0),
            max_capability=(9, 0),
            phases=frozenset({"prefill"}),
            band=Band.TUNED,
            formats={"activation": frozenset({"bf16"}), "weight": frozenset({"mxfp4"})},
            activation_rounding=("fp8_group128", f"fp8_group{HIDDEN_GROUP}"),
            limits=_limits,
            prepare=tiled,
            note="not yet run on a GPU; mxfp4 expanded inside the products",
        )
    )


if __name__.endswith("_impl"):
    register_fused()
