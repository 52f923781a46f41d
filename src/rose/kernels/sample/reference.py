"""Sampling by its definition, row by row in plain order: filter, hash, Gumbel, argmax."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_BELOW_ONE = 1 - 2.0**-24
NO_TOKEN = -1
"""Of a row whose largest logit is not finite."""


def reference(
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
    """Choose a token per row; see the contract."""
    for s, logits_V in enumerate(logits_SV.float()):
        logits_V = logits_V.masked_fill(logits_V.isnan(), -torch.inf)
        if not logits_V.max().isfinite():
            tokens_S[s] = NO_TOKEN
            continue
        temperature = temperature_S[s]
        if temperature == 0:
            tokens_S[s] = logits_V.argmax()  # the first of equals
            continue
        scaled_V = logits_V / temperature
        if is_filtered:
            is_kept_V = kept(scaled_V, int(top_k_S[s]), float(top_p_S[s]), float(min_p_S[s]))
            scaled_V = scaled_V.masked_fill(~is_kept_V, -torch.inf)
        ids_V = torch.arange(len(scaled_V), device=logits_SV.device)
        tokens_S[s] = (scaled_V + gumbel(seed_S[s], position_S[s], ids_V)).argmax()


def kept(scaled_V: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Return which ids pass the filters; probabilities are summed in float64."""
    order_V = scaled_V.argsort(descending=True, stable=True)  # equal logits: lower id first
    p_V = scaled_V.double().softmax(dim=-1)[order_V]
    is_kept_V = p_V >= min_p * p_V[0]
    if top_k > 0:
        is_kept_V[top_k:] = False
        p_V = p_V / p_V[:top_k].sum()
    is_kept_V &= p_V.cumsum(0) - p_V < top_p
    return torch.zeros_like(is_kept_V).index_copy_(0, order_V, is_kept_V)


def gumbel(seed: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """Return -log(-log(u)) of each (seed, position, id), float32; the three broadcast."""
    h = _mix((seed & _MASK) ^ 0x9E3779B9)
    h = _mix(h ^ ((seed >> 32) & _MASK) ^ ((0x85EBCA6B * position) & _MASK))
    h = _mix((h + ids) & _MASK)
    u = ((h.float() + 0.5) * 2.0**-32).clamp_max(_BELOW_ONE)
    return -torch.log(-torch.log(u))


def _mix(h: Tensor) -> Tensor:
    """Mix 32 bits held in int64; products wrap, and only their low 32 bits count."""
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & _MASK
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & _MASK
    return h ^ (h >> 16)
