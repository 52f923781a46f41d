"""Experts for many tokens on Hopper: persistent, warp-specialised FP8 products in CUDA C++.

Three implementations share the kernels: fp8_block weights as they are; mxfp4 with an fp8 copy made at load
(where both fit); mxfp4 expanded on its way to the tensor core, for `kernels.only` alone (where they do not fit,
cuda_swapped_impl.py and cuda_wide_impl.py are bound).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.formats import FP8_BLOCK, FormattedTensor
from rose.kernels.moe_experts.cuda_fused import (
    DEFAULT,
    HIDDEN_GROUP,
    MAX_CHOSEN,
    MAX_EXPERTS,
    VARIANTS,
    X_GROUP,
    FusedLibrary,
    run_experts,
    workspace,
)
from rose.kernels.moe_experts.mxfp4_tiles import TiledExperts, multipliers, tile_exponents, tiled
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import ExpertWeights

LIBRARY = FusedLibrary()
_BETWEEN_TILES = "the warps that expand have 32 registers and the others up to 224: what is kept is read between tiles"
SPILLS = {"ELb1ELi2ELi4EE": (60, _BETWEEN_TILES), "ELb1ELi2ELi3EE": (108, _BETWEEN_TILES)}
"""For `python -m rose.kernels aot`: bytes and reason, by a part of the kernel's name (MXFP4: down, gate-up)."""
COPY_MAX_EXPERTS = 64
"""Up to here a layer's FP8 copy is kept beside MXFP4: 20b (32 experts) 10 + 19 GB; 120b would need 180 GB."""


def moe_experts(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: ExpertWeights | TiledExperts,
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
        block_m=DEFAULT if isinstance(weights, TiledExperts) else VARIANTS["r128"],
    )


def fp8_copy(weights: ExpertWeights) -> ExpertWeights:
    """Expand MXFP4 experts to fp8_block once; biases are shared."""
    return ExpertWeights(
        gate_up=_expanded(weights.gate_up),
        gate_up_bias_EF=weights.gate_up_bias_EF,
        down=_expanded(weights.down),
        down_bias_ED=weights.down_bias_ED,
    )


def _expanded(matrix: FormattedTensor) -> FormattedTensor:
    exponents = tile_exponents(matrix)
    out = matrix.values.new_empty(matrix.values.numel() * 2, dtype=torch.float8_e4m3fn)
    values = LIBRARY.expand(matrix, exponents, out=out)
    return FormattedTensor(format=FP8_BLOCK, values=values, scales=multipliers(exponents))


def size_limits(sizes: Sizes) -> str | None:
    """Say why these sizes cannot be taken, or None."""
    for name in ("D", "I"):
        if sizes[name] % 64:
            return f"{name} = {sizes[name]}; takes multiples of 64"
    if sizes["E"] > MAX_EXPERTS:
        return f"{sizes['E']} experts; the sort takes up to {MAX_EXPERTS}"
    if sizes["K"] > MAX_CHOSEN:
        return f"{sizes['K']} experts per token; takes up to {MAX_CHOSEN}"
    return None


def _limits(sizes: Sizes) -> str | None:
    return size_limits(sizes) or LIBRARY.library.refusal()


def _copy_limits(sizes: Sizes) -> str | None:
    if sizes["E"] > COPY_MAX_EXPERTS:
        return f"{sizes['E']} experts; keeps an fp8 copy of up to {COPY_MAX_EXPERTS}"
    return _limits(sizes)


_COMMON = {
    "operation": "moe_experts",
    "function": moe_experts,
    "device": "cuda",
    "min_capability": (9, 0),
    "max_capability": (9, 0),
    "phases": frozenset({"prefill"}),
    "library": LIBRARY.library,
    "workspace": workspace,
    "activation_rounding": (f"fp8_group{X_GROUP}", f"fp8_group{HIDDEN_GROUP}"),
}
register(
    Implementation(
        name="cuda_fused",
        band=Band.SPECIALISED,
        formats={"activation": frozenset({"bf16"}), "weight": frozenset({"fp8_block"})},
        limits=_limits,
        note="FP8 products by TMA and WGMMA, bias in the float32 accumulators",
        **_COMMON,
    )
)
register(
    Implementation(
        name="cuda_fused_copy",
        band=Band.SPECIALISED,
        formats={"activation": frozenset({"bf16"}), "weight": frozenset({"mxfp4"})},
        limits=_copy_limits,
        prepare=fp8_copy,
        note="the same on an fp8 copy made at load, exact where tile exponents span at most 14",
        **_COMMON,
    )
)
register(
    Implementation(
        name="cuda_fused_mxfp4",
        band=Band.PORTABLE,
        formats={"activation": frozenset({"bf16"}), "weight": frozenset({"mxfp4"})},
        limits=_limits,
        prepare=tiled,
        note="the same, mxfp4 expanded on its way to the tensor core",
        **_COMMON,
    )
)
