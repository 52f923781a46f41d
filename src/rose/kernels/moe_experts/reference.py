"""The experts by their formula: each token through each of its experts, in float32 (float64 stays)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rose.kernels.formats import FP8_SWIGLU, swiglu_unit, to_e4m3
from rose.kernels.quantize_activation.reference import rounded
from rose.kernels.weights import ExpertWeights


def swiglu(u_TF: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Gate and up interleaved: the gate is clamped above only, up on both sides."""
    gate_TI = u_TF[..., 0::2].clamp(max=limit)
    up_TI = u_TF[..., 1::2].clamp(-limit, limit)
    return gate_TI * torch.sigmoid(alpha * gate_TI) * (up_TI + 1)


def rounded_swiglu(hidden_TI: Tensor, format_name: str, *, limit: float) -> Tensor:
    """Return the SwiGLU as `format_name` holds it; of the formats of activations, FP8_SWIGLU alone needs the limit."""
    if format_name != FP8_SWIGLU.name:
        return rounded(hidden_TI, format_name)
    unit = swiglu_unit(limit)
    return to_e4m3(hidden_TI / unit).to(hidden_TI.dtype) * unit


def reference(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: ExpertWeights,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
) -> None:
    """Run one expert after the other over the tokens that chose it; see the contract."""
    _experts(
        x_TD,
        expert_ids_TK,
        expert_weights_TK,
        weights=weights,
        activation=lambda u_TF: swiglu(u_TF, alpha=swiglu_alpha, limit=swiglu_limit),
        out_TD=out_TD,
    )


def rounded_reference(
    rounding: tuple[str, ...],
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: ExpertWeights,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
) -> None:
    """The same with the inputs of the two matrices rounded to `rounding`: (of x, of the SwiGLU)."""
    of_x, of_hidden = rounding
    _experts(
        rounded(x_TD.float(), of_x),
        expert_ids_TK,
        expert_weights_TK,
        weights=weights,
        activation=lambda u_TF: rounded_swiglu(
            swiglu(u_TF, alpha=swiglu_alpha, limit=swiglu_limit), of_hidden, limit=swiglu_limit
        ),
        out_TD=out_TD,
    )


def _experts(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: ExpertWeights,
    activation: Callable[[Tensor], Tensor],
    out_TD: Tensor,
) -> None:
    wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    x_TD = x_TD.to(wide)
    y_TKD = x_TD.new_zeros(*expert_ids_TK.shape, x_TD.shape[1])
    for e in expert_ids_TK.unique().tolist():
        if e < 0:
            continue
        token, k = torch.where(expert_ids_TK == e)
        u_NF = x_TD[token] @ weights.gate_up[e].to_float(wide).T
        u_NF += weights.gate_up_bias_EF[e].to(wide)
        y_ND = activation(u_NF) @ weights.down[e].to_float(wide).T
        y_TKD[token, k] = y_ND + weights.down_bias_ED[e].to(wide)
    out_TD.copy_((y_TKD * expert_weights_TK.to(wide).unsqueeze(-1)).sum(dim=1))
