"""The blocks by the references of their parts, one block after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.attention_decode.reference import reference as attention_decode
from rose.kernels.gemm.reference import reference as gemm
from rose.kernels.moe_experts.reference import reference as moe_experts
from rose.kernels.moe_route.reference import reference as moe_route
from rose.kernels.rms_norm.reference import reference as rms_norm
from rose.kernels.rope_kv_write.reference import reference as rope_kv_write
from rose.kernels.weights import BlockWeights, LinearWeights, StackWeights


def reference(
    residual_SD: Tensor,
    positions_S: Tensor,
    lengths_S: Tensor,
    cos_sin_NA: Tensor,
    *,
    full_table_SP: Tensor,
    full_slots_S: Tensor,
    window_table_SP: Tensor,
    window_slots_S: Tensor,
    kv_pages: list[Tensor],
    weights: StackWeights,
    experts_per_token: int,
    eps: float,
    swiglu_alpha: float,
    swiglu_limit: float,
) -> None:
    """Run the parts of every block; each result is rounded to the activation dtype. See the contract."""
    full, window = (full_table_SP, full_slots_S), (window_table_SP, window_slots_S)
    h_SD = torch.empty_like(residual_SD)
    x_SD = None
    for block, pages in zip(weights.blocks, kv_pages, strict=True):
        _add_and_norm(x_SD, residual_SD, block.attention_norm_D, eps, h_SD)
        table_SP, slots_S = full if block.window_tokens is None else window
        qkv_SF = _project(h_SD, block.qkv)
        rope_kv_write(qkv_SF, positions_S, cos_sin_NA, slots_S, kv_pages=pages)
        out_SF = _attend(qkv_SF, pages, table_SP, lengths_S, block)
        _add_and_norm(_project(out_SF, block.out), residual_SD, block.expert_norm_D, eps, h_SD)
        ids_SK = torch.empty(len(h_SD), experts_per_token, dtype=torch.int32, device=h_SD.device)
        weights_SK = torch.empty_like(ids_SK, dtype=h_SD.dtype)
        moe_route(h_SD, weights=block.router, expert_ids_TK=ids_SK, expert_weights_TK=weights_SK)
        x_SD = torch.empty_like(h_SD)
        moe_experts(
            h_SD,
            ids_SK,
            weights_SK,
            weights=block.experts,
            swiglu_alpha=swiglu_alpha,
            swiglu_limit=swiglu_limit,
            out_TD=x_SD,
        )
    if x_SD is not None:
        residual_SD += x_SD


def _add_and_norm(
    x_SD: Tensor | None, residual_SD: Tensor, weight_D: Tensor, eps: float, out_SD: Tensor
) -> None:
    """`x_SD` None: before the first block there is nothing to add."""
    is_first = x_SD is None
    rms_norm(
        residual_SD if is_first else x_SD,
        weight_D,
        eps=eps,
        residual_TD=None if is_first else residual_SD,
        out_TD=out_SD,
    )


def _project(x_SK: Tensor, weights: LinearWeights) -> Tensor:
    out_SN = x_SK.new_empty(len(x_SK), weights.matrix.shape[0])
    gemm(x_SK, weights=weights, residual_TN=None, out_TN=out_SN)
    return out_SN


def _attend(
    qkv_SF: Tensor, pages: Tensor, table_SP: Tensor, lengths_S: Tensor, block: BlockWeights
) -> Tensor:
    """Return [S, H A]."""
    num_heads, head_dim = len(block.sinks_H), pages.shape[-1]
    q_SHA = qkv_SF[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    out_SHA = q_SHA.new_empty(q_SHA.shape)
    attention_decode(
        q_SHA,
        pages,
        table_SP,
        lengths_S,
        block.sinks_H,
        scale=head_dim**-0.5,
        window_tokens=block.window_tokens,
        max_length=table_SP.shape[1] * pages.shape[3],
        out_SHD=out_SHA,
    )
    return out_SHA.flatten(1)
