"""The blocks with torch operators, unfused: `check` runs it anywhere, and its name stands in the table of a model for
which there is no kernel.

A model never calls it: where it is bound, the model's own layers run, each with the kernels bound for it. It rounds
where GPU kernels do: also the SwiGLU and each expert's output.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from rose.kernels.registry import Band, Implementation, register
from rose.kernels.weights import BlockWeights, ExpertWeights, LinearWeights, StackWeights
from rose.utils.math import ceil_div


def decode_layers(
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
    """See the contract."""
    wide = _wide(residual_SD)
    cos_S1C, sin_S1C = cos_sin_NA.to(wide)[positions_S].unsqueeze(1).chunk(2, dim=-1)
    lengths = lengths_S.tolist()
    for block, pages in zip(weights.blocks, kv_pages, strict=True):
        is_full = block.window_tokens is None
        table_SP = full_table_SP if is_full else window_table_SP
        h_SD = _norm(residual_SD, block.attention_norm_D, eps)
        num_heads, head_dim = len(block.sinks_H), pages.shape[-1]
        qkv_SXA = _project(h_SD, block.qkv).unflatten(1, (-1, head_dim))
        split = [num_heads, pages.shape[2], pages.shape[2]]
        q_SHA, k_SGA, v_SGA = qkv_SXA.split(split, dim=1)
        q_SHA, k_SGA = _rotate(q_SHA, cos_S1C, sin_S1C), _rotate(k_SGA, cos_S1C, sin_S1C)
        _write(pages, full_slots_S if is_full else window_slots_S, torch.stack([k_SGA, v_SGA], 1))
        rows = [
            _attend(q_SHA[s], pages, table_SP[s], block, length) for s, length in enumerate(lengths)
        ]
        residual_SD += _project(torch.stack(rows).flatten(1), block.out)
        h_SD = _norm(residual_SD, block.expert_norm_D, eps)
        ids_SK, shares_SK = _route(h_SD, block.router, experts_per_token)
        rows = [
            _experts(h_SD[s], ids, shares_SK[s], block.experts, swiglu_alpha, swiglu_limit)
            for s, ids in enumerate(ids_SK.tolist())
        ]
        residual_SD += torch.stack(rows)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _norm(x_SD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    x, weight_D = x_SD.to(_wide(x_SD)), weight_D.to(_wide(x_SD))
    return torch.nn.functional.rms_norm(x, weight_D.shape, weight_D, eps).to(x_SD.dtype)


def _project(x_SK: Tensor, weights: LinearWeights) -> Tensor:
    wide = _wide(x_SK)
    bias_N = None if weights.bias_N is None else weights.bias_N.to(wide)
    return linear(x_SK.to(wide), weights.matrix.to_float(wide), bias_N).to(x_SK.dtype)


def _rotate(x_SXA: Tensor, cos_S1C: Tensor, sin_S1C: Tensor) -> Tensor:
    """Multiply the pairs (i, i + A / 2) as complex numbers."""
    low, high = x_SXA.to(cos_S1C.dtype).chunk(2, dim=-1)
    turned = torch.complex(low, high) * torch.complex(cos_S1C, sin_S1C)
    return torch.cat([turned.real, turned.imag], dim=-1).to(x_SXA.dtype)


def _write(pages: Tensor, slots_S: Tensor, kv_S2GA: Tensor) -> None:
    kept = torch.nonzero(slots_S >= 0).squeeze(1)
    slots = slots_S[kept]
    pages[slots // pages.shape[3], :, :, slots % pages.shape[3]] = kv_S2GA[kept].to(pages.dtype)


def _attend(
    q_HA: Tensor, pages: Tensor, table_P: Tensor, block: BlockWeights, length: int
) -> Tensor:
    """Return [H, A]; the sink enters through the logarithm of the normaliser."""
    if length == 0:
        return torch.zeros_like(q_HA)
    wide, page_tokens = _wide(q_HA), pages.shape[3]
    first = 0 if block.window_tokens is None else max(0, length - block.window_tokens)
    column = first // page_tokens
    owned = table_P[column : ceil_div(length, page_tokens)].long()
    seen = slice(first - column * page_tokens, length - column * page_tokens)
    k_GKA, v_GKA = pages[owned].to(wide).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, seen]
    q_GRA = q_HA.to(wide).unflatten(0, (len(k_GKA), -1))
    scores_GRK = torch.einsum("gra,gka->grk", q_GRA, k_GKA) / q_HA.shape[-1] ** 0.5
    sinks_GR = block.sinks_H.to(wide).view(q_GRA.shape[:2])
    total_GR1 = torch.logaddexp(scores_GRK.logsumexp(-1), sinks_GR).unsqueeze(-1)
    weights_GRK = (scores_GRK - total_GR1).exp()
    return torch.einsum("grk,gka->gra", weights_GRK, v_GKA).flatten(0, 1).to(q_HA.dtype)


def _route(h_SD: Tensor, router: LinearWeights, num_chosen: int) -> tuple[Tensor, Tensor]:
    wide = _wide(h_SD)
    bias_E = None if router.bias_N is None else router.bias_N.to(wide)
    logits_SE = linear(h_SD.to(wide), router.matrix.to_float(wide), bias_E)
    best_SE, ids_SE = logits_SE.sort(dim=-1, descending=True, stable=True)
    return ids_SE[:, :num_chosen], best_SE[:, :num_chosen].softmax(dim=-1).to(h_SD.dtype)


def _experts(
    h_D: Tensor,
    ids: list[int],
    shares_K: Tensor,
    experts: ExpertWeights,
    alpha: float,
    limit: float,
) -> Tensor:
    wide = _wide(h_D)
    y_D = torch.zeros_like(h_D, dtype=wide)
    for share, e in zip(shares_K.to(wide), ids, strict=True):
        bias_F, bias_D = experts.gate_up_bias_EF[e].to(wide), experts.down_bias_ED[e].to(wide)
        u_F = torch.mv(experts.gate_up[e].to_float(wide), h_D.to(wide)) + bias_F
        gate_I, up_I = u_F.view(-1, 2).unbind(1)
        gate_I, up_I = gate_I.clamp(max=limit), up_I.clamp(-limit, limit)
        a_I = (gate_I * torch.sigmoid(alpha * gate_I) * (up_I + 1)).to(h_D.dtype)
        out_D = torch.mv(experts.down[e].to_float(wide), a_I.to(wide)) + bias_D
        y_D += share * out_D.to(h_D.dtype).to(wide)
    return y_D.to(h_D.dtype)


register(
    Implementation(
        operation="decode_layers",
        name="blocks",
        function=decode_layers,
        band=Band.PORTABLE,
        is_unfused=True,
        is_capturable=False,
        note="the blocks' own operations one after the other, each with the kernel bound for it",
    )
)
