"""Sampling with torch operators: runs anywhere, all rows at once; sorts only where a row filters."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.registry import Band, Implementation, register
from rose.kernels.sample.reference import NO_TOKEN, gumbel


def sample(
    logits_SV: Tensor,
    temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    min_p_S: Tensor,
    seed_S: Tensor,
    position_S: Tensor,
    *,
    is_filtered: bool,
    tokens_S: Tensor,
) -> None:
    """Greedy rows add no noise and filter nothing; the rest is one argmax."""
    is_greedy_S1 = (temperature_S == 0).unsqueeze(1)
    logits_SV = logits_SV.float()
    logits_SV = logits_SV.masked_fill(logits_SV.isnan(), -torch.inf)
    is_finite_S = logits_SV.amax(dim=-1).isfinite()
    scaled_SV = logits_SV / temperature_S.unsqueeze(1).masked_fill(is_greedy_S1, 1)
    if is_filtered:
        is_kept_SV = _kept(scaled_SV, top_k_S, top_p_S, min_p_S) | is_greedy_S1
        scaled_SV = scaled_SV.masked_fill(~is_kept_SV, -torch.inf)
    ids_V = torch.arange(logits_SV.shape[1], device=logits_SV.device)
    noise_SV = gumbel(seed_S.unsqueeze(1), position_S.unsqueeze(1), ids_V)
    chosen_S = torch.where(is_greedy_S1, logits_SV, scaled_SV + noise_SV).argmax(dim=-1)
    tokens_S.copy_(torch.where(is_finite_S, chosen_S, NO_TOKEN))


def _kept(scaled_SV: Tensor, top_k_S: Tensor, top_p_S: Tensor, min_p_S: Tensor) -> Tensor:
    sorted_SV, order_SV = scaled_SV.sort(dim=-1, descending=True, stable=True)
    p_SV = sorted_SV.double().softmax(dim=-1)
    is_kept_SV = p_SV >= min_p_S.double().unsqueeze(1) * p_SV[:, :1]
    rank_V = torch.arange(p_SV.shape[1], device=p_SV.device)
    is_top_SV = (rank_V < top_k_S.unsqueeze(1)) | (top_k_S.unsqueeze(1) <= 0)
    p_SV = p_SV / (p_SV * is_top_SV).sum(dim=-1, keepdim=True)
    is_kept_SV &= is_top_SV & (p_SV.cumsum(-1) - p_SV < top_p_S.double().unsqueeze(1))
    return torch.zeros_like(is_kept_SV).scatter_(1, order_SV, is_kept_SV)


register(
    Implementation(
        operation="sample",
        name="torch",
        function=sample,
        band=Band.PORTABLE,
        note="all rows at once; sorts the vocabulary where a row filters",
    )
)
