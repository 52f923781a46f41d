"""Experts for many tokens on Hopper: persistent, warp-specialised FP8 products in CUDA C++.

Three implementations share the kernels: fp8_block weights as they are; mxfp4 with an fp8 copy made at load
(where both fit); mxfp4 expanded at every call into a scratch buffer (120b, which cannot hold both).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.formats import FP8_BLOCK, FormattedTensor
from rose.kernels.moe_experts.cuda_prefill import (
    DEFAULT,
    MAX_CHOSEN,
    MAX_EXPERTS,
    PrefillLibrary,
    run_experts,
    workspace,
)
from rose.kernels.moe_experts.mxfp4_tiles import TiledExperts, multipliers, tile_exponents, tiled
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import ExpertWeights

LIBRARY = PrefillLibrary()
SPILLS = {
    "ELi2EEE": (
        8,
        "256-column cluster kernels keep two integers of the schedule, read once per tile",
    )
}
"""For `python -m rose.kernels aot`: bytes and reason, by a part of the kernel's name."""
COPY_MAX_EXPERTS = 64
"""Up to here a layer's FP8 copy is kept beside MXFP4: 20b (32 experts) 10 + 19 GB; 120b would need 180 GB."""


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
        LIBRARY,
        x_TD,
        expert_ids_TK,
        expert_weights_TK,
        weights=weights,
        swiglu_alpha=swiglu_alpha,
        swiglu_limit=swiglu_limit,
        out_TD=out_TD,
    )


def moe_experts_expanding(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: TiledExperts,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
) -> None:
    """See the contract; each matrix is expanded into one scratch buffer just before its product."""
    if x_TD.shape[0] == 0:
        return
    plain = weights.weights
    table = LIBRARY.sort_by_expert(expert_ids_TK, num_experts=plain.gate_up.shape[0])
    x_RD, x_scales = LIBRARY.quantize_rows(x_TD, table)
    elements = max(plain.gate_up.values.numel(), plain.down.values.numel()) * 2
    scratch = x_TD.new_empty(elements, dtype=torch.float8_e4m3fn)
    a_RI, a_scales = LIBRARY.gate_up(
        x_RD, x_scales, table,
        values_EFD=LIBRARY.expand(plain.gate_up, weights.gate_up_exponents, out=scratch),
        scales=weights.gate_up_scales, bias_EF=plain.gate_up_bias_EF,
        alpha=swiglu_alpha, limit=swiglu_limit, columns=DEFAULT.gate_up, cluster=DEFAULT.cluster,
    )  # fmt: skip
    y_RD = LIBRARY.down(
        a_RI, a_scales, table,
        values_EDI=LIBRARY.expand(plain.down, weights.down_exponents, out=scratch),
        scales=weights.down_scales, bias_ED=plain.down_bias_ED,
        group=DEFAULT.hidden_group, columns=DEFAULT.down, cluster=DEFAULT.cluster,
    )  # fmt: skip
    LIBRARY.combine(y_RD, table, expert_weights_TK, out_TD=out_TD)


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


def _limits(sizes: Sizes) -> str | None:
    for name in ("D", "I"):
        if sizes[name] % 64:
            return f"{name} = {sizes[name]}; takes multiples of 64"
    if sizes["E"] > MAX_EXPERTS:
        return f"{sizes['E']} experts; the sort takes up to {MAX_EXPERTS}"
    if sizes["K"] > MAX_CHOSEN:
        return f"{sizes['K']} experts per token; takes up to {MAX_CHOSEN}"
    return LIBRARY.library.refusal()


def _copy_limits(sizes: Sizes) -> str | None:
    if sizes["E"] > COPY_MAX_EXPERTS:
        return f"{sizes['E']} experts; keeps an fp8 copy of up to {COPY_MAX_EXPERTS}"
    return _limits(sizes)


def _expanding_workspace(sizes: Sizes, rows: int, longest: int) -> int:
    scratch = 2 * sizes["E"] * sizes["I"] * sizes["D"]
    return scratch + workspace(sizes, rows, longest)


_COMMON = {
    "operation": "moe_experts",
    "device": "cuda",
    "min_capability": (9, 0),
    "max_capability": (9, 0),
    "phases": frozenset({"prefill"}),
    "library": LIBRARY.library,
    "workspace": workspace,
    "activation_rounding": ("fp8_group128", f"fp8_group{DEFAULT.hidden_group}"),
}
register(
    Implementation(
        name="cuda_prefill",
        function=moe_experts,
        band=Band.SPECIALISED,
        formats={"activation": frozenset({"bf16"}), "weight": frozenset({"fp8_block"})},
        limits=_limits,
        note="FP8 products by TMA and WGMMA, bias in the float32 accumulators",
        **_COMMON,
    )
)
register(
    Implementation(
        name="cuda_prefill_copy",
        function=moe_experts,
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
        name="cuda_prefill_expand",
        function=moe_experts_expanding,
        band=Band.TUNED,
        formats={"activation": frozenset({"bf16"}), "weight": frozenset({"mxfp4"})},
        limits=_limits,
        prepare=tiled,
        note="the same, each matrix expanded into scratch memory at every call",
        **{**_COMMON, "workspace": _expanding_workspace},
    )
)
