"""gpt-oss in plain PyTorch: one prompt, no cache, float32 or float64. The oracle of everything else.

Written to be read beside the model card, and to share nothing with the engine: it imports nothing of rose.
Weights are a dict in the names and shapes of OpenAI's `original/` checkpoints, expert matrices expanded to
plain numbers; their dtype is the dtype of the computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

# T tokens, D hidden, H query heads, G kv heads, d head size, E experts, K chosen, I intermediate, V vocabulary


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The numbers of config.json, and the two that are in none."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    experts_per_token: int
    window_tokens: int = 128
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_factor: float = 32.0
    rope_original_tokens: int = 4096
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702


@dataclass
class Trace:
    """What happened inside: per layer the residual stream after it [T, D] and the experts chosen [T, K]."""

    residuals: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) times the weight."""
    return x_TD * torch.rsqrt(x_TD.square().mean(dim=-1, keepdim=True) + eps) * weight_D


def yarn_frequencies(config: ReferenceConfig, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Return radians per position of each pair [d / 2], and the concentration of cos and sin."""
    d, theta = config.head_dim, config.rope_theta

    def pair_that_turns(times: float) -> float:
        return (
            d / 2 * math.log(config.rope_original_tokens / (times * 2 * math.pi)) / math.log(theta)
        )

    pair = torch.arange(0, d // 2, dtype=dtype)
    base = theta ** (2 * pair / d)
    low = pair_that_turns(config.rope_beta_fast)  # neither bound is rounded: "truncate": false
    high = pair_that_turns(config.rope_beta_slow)
    interpolated = ((pair - low) / (high - low)).clamp(0, 1)
    frequency = interpolated / (config.rope_factor * base) + (1 - interpolated) / base
    return frequency, 0.1 * math.log(config.rope_factor) + 1.0


def rotary_angles(config: ReferenceConfig, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Return cos and sin, stacked [2, T, d / 2].

    Frequency and angle are float32 in float64 models too, as in every published implementation: far from
    the start they differ from the true angle by more than the last digits, and the models are used so.
    """
    frequency, concentration = yarn_frequencies(config, torch.float32)
    position = torch.arange(num_positions, dtype=torch.float32)
    angle = (position[:, None] * frequency).to(dtype)
    return torch.stack([angle.cos(), angle.sin()]) * concentration


def rotate(x_THd: Tensor, angles: Tensor) -> Tensor:
    """Turn element i and element i + d/2 of each head by the angle of pair i."""
    cos, sin = angles[0][:, None], angles[1][:, None]
    first, second = x_THd.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(
    q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sinks_H: Tensor, *, window_tokens: int | None
) -> Tensor:
    """Causal attention whose softmax has one more column, the sink, that carries no value."""
    num_tokens, num_heads, d = q_THd.shape
    group = num_heads // k_TGd.shape[1]
    k_THd, v_THd = k_TGd.repeat_interleave(group, dim=1), v_TGd.repeat_interleave(group, dim=1)
    scores_HTT = torch.einsum("qhd,khd->hqk", q_THd, k_THd) / math.sqrt(d)
    query, key = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)
    is_hidden = key > query
    if window_tokens is not None:
        is_hidden = is_hidden | (key <= query - window_tokens)
    scores_HTT = scores_HTT.masked_fill(is_hidden, -math.inf)
    sink_HT1 = sinks_H[:, None, None].expand(-1, num_tokens, 1)
    weights_HTT = torch.softmax(torch.cat([scores_HTT, sink_HT1], dim=-1), dim=-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights_HTT, v_THd)


def swiglu(u: Tensor, alpha: float, limit: float) -> Tensor:
    """Even channels gate (clamped above), odd ones pass (clamped on both sides), plus one."""
    gate, up = u[..., 0::2].clamp(max=limit), u[..., 1::2].clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def route(logits_TE: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
    """Return the best experts and their weights: a softmax over the chosen logits only."""
    best_TE, experts_TE = torch.sort(logits_TE, dim=-1, descending=True, stable=True)
    return experts_TE[:, :num_chosen], torch.softmax(best_TE[:, :num_chosen], dim=-1)


def attention_block(
    x_TD: Tensor, w: dict[str, Tensor], config: ReferenceConfig, angles: Tensor, window: int | None
) -> Tensor:
    """What attention adds to the residual stream."""
    num_tokens, d = len(x_TD), config.head_dim
    heads, kv_heads = config.num_q_heads, config.num_kv_heads
    h_TD = rms_norm(x_TD, w["attn.norm.scale"], config.rms_norm_eps)
    qkv = h_TD @ w["attn.qkv.weight"].T + w["attn.qkv.bias"]
    q, k, v = qkv.view(num_tokens, -1, d).split([heads, kv_heads, kv_heads], dim=1)
    out_THd = attention(
        rotate(q, angles), rotate(k, angles), v, w["attn.sinks"], window_tokens=window
    )
    return out_THd.reshape(num_tokens, heads * d) @ w["attn.out.weight"].T + w["attn.out.bias"]


def expert_block(
    x_TD: Tensor, w: dict[str, Tensor], config: ReferenceConfig
) -> tuple[Tensor, Tensor]:
    """What the experts add to the residual stream, and which they were."""
    h_TD = rms_norm(x_TD, w["mlp.norm.scale"], config.rms_norm_eps)
    logits_TE = h_TD @ w["mlp.gate.weight"].T + w["mlp.gate.bias"]
    experts_TK, weights_TK = route(logits_TE, config.experts_per_token)
    out_TD = torch.zeros_like(h_TD)
    for e in range(logits_TE.shape[1]):
        token, k = torch.where(experts_TK == e)
        u = h_TD[token] @ w["mlp.mlp1_weight"][e].T + w["mlp.mlp1_bias"][e]
        a = swiglu(u, config.swiglu_alpha, config.swiglu_limit)
        y = a @ w["mlp.mlp2_weight"][e].T + w["mlp.mlp2_bias"][e]
        out_TD.index_add_(0, token, weights_TK[token, k, None] * y)
    return out_TD, experts_TK


@torch.no_grad()
def forward(
    config: ReferenceConfig,
    weights: dict[str, Tensor],
    token_ids_T: Tensor,
    *,
    trace: Trace | None = None,
) -> Tensor:
    """Return logits [T, V]: position t predicts token t + 1."""
    x_TD = weights["embedding.weight"][token_ids_T]
    angles = rotary_angles(config, len(token_ids_T), x_TD.dtype)
    for n in range(config.num_layers):
        prefix = f"block.{n}."
        w = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        window = config.window_tokens if n % 2 == 0 else None
        x_TD = x_TD + attention_block(x_TD, w, config, angles, window)
        added_TD, experts_TK = expert_block(x_TD, w, config)
        x_TD = x_TD + added_TD
        if trace is not None:
            trace.residuals.append(x_TD)
            trace.experts.append(experts_TK)
    x_TD = rms_norm(x_TD, weights["norm.scale"], config.rms_norm_eps)
    return x_TD @ weights["unembedding.weight"].T
