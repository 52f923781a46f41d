"""gpt-oss in a form that trains: batched, differentiable, every expert computed and the unchosen weighted by zero.

The mathematics is that of src/rose/models/gpt_oss/reference.py (a test compares them). Expert matrices pass through
an MXFP4 rounding with a straight-through gradient, so that the shipped MXFP4 checkpoint is the trained model.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rose.models.gpt_oss.config import GptOssConfig

_HALVES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def fake_quantize(w: Tensor) -> Tensor:
    """Round to MXFP4 going forward; the gradient passes as if nothing had been rounded.

    Per 32 columns: the smallest power of two not below largest / 6, as rose.quant.mxfp4 chooses it; numbers halfway
    between two codes may differ from it, which the exported checkpoint settles.
    """
    with torch.no_grad():
        blocks = w.unflatten(-1, (-1, 32))
        largest = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        scale = torch.exp2(torch.ceil(torch.log2(largest / 6)))
        codes = _CODES.to(w.device)[torch.bucketize(blocks.abs() / scale, _HALVES.to(w.device))]
        rounding = (codes * scale * blocks.sign() - blocks).flatten(-2)
    return w + rounding


def yarn_frequencies(config: GptOssConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [D / 2] in float64 and the concentration; no truncation of the ramp's ends."""
    half, theta = config.head_dim // 2, config.rope_theta
    base = theta ** (torch.arange(half, dtype=torch.float64) / half)

    def turn(beta: float) -> float:
        return half * math.log(config.rope_original_tokens / (beta * 2 * math.pi)) / math.log(theta)

    low, high = turn(config.rope_beta_fast), turn(config.rope_beta_slow)
    ramp = ((torch.arange(half, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    concentration = 0.1 * math.log(config.rope_scaling_factor) + 1.0
    return ramp / (config.rope_scaling_factor * base) + (1 - ramp) / base, concentration


class Block(nn.Module):
    """One layer; parameter names are those of the Hugging Face layout, dots as underscores."""

    def __init__(self, config: GptOssConfig, window: int | None) -> None:
        super().__init__()
        self.config, self.window = config, window
        hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
        q = config.num_q_heads * config.head_dim
        kv = config.num_kv_heads * config.head_dim

        def normal(*shape: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) * scale / math.sqrt(shape[-1]))

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape))

        self.input_layernorm = nn.Parameter(torch.ones(hidden))
        self.post_attention_layernorm = nn.Parameter(torch.ones(hidden))
        self.q_proj, self.q_bias = normal(q, hidden), zeros(q)
        self.k_proj, self.k_bias = normal(kv, hidden), zeros(kv)
        self.v_proj, self.v_bias = normal(kv, hidden), zeros(kv)
        self.o_proj, self.o_bias = normal(hidden, q, scale=0.5), zeros(hidden)
        self.sinks = zeros(config.num_q_heads)
        self.router, self.router_bias = normal(experts, hidden), zeros(experts)
        self.gate_up_proj, self.gate_up_bias = (
            normal(experts, 2 * inner, hidden),
            zeros(experts, 2 * inner),
        )
        self.down_proj, self.down_bias = (
            normal(experts, hidden, inner, scale=0.5),
            zeros(experts, hidden),
        )

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) * weight
        )

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        config = self.config
        batch, tokens, _ = x.shape
        groups = config.num_q_heads // config.num_kv_heads

        def heads(y: Tensor, number: int) -> Tensor:
            return y.view(batch, tokens, number, config.head_dim).transpose(1, 2)

        def rotate(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        q = rotate(heads(linear(x, self.q_proj, self.q_bias), config.num_q_heads))
        k = rotate(heads(linear(x, self.k_proj, self.k_bias), config.num_kv_heads))
        v = heads(linear(x, self.v_proj, self.v_bias), config.num_kv_heads)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        score = q @ k.transpose(-1, -2) / math.sqrt(config.head_dim)
        place = torch.arange(tokens, device=x.device)
        distance = place[:, None] - place[None, :]
        seen = (
            (distance >= 0) if self.window is None else (distance >= 0) & (distance < self.window)
        )
        score = score.masked_fill(~seen, float("-inf"))
        sink = self.sinks.view(1, -1, 1, 1).expand(batch, -1, tokens, 1)
        weight = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
        out = (weight @ v).transpose(1, 2).reshape(batch, tokens, -1)
        return linear(out, self.o_proj, self.o_bias)

    def experts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        logits = linear(x, self.router, self.router_bias)
        best, chosen = logits.topk(config.experts_per_token, dim=-1)
        weight = torch.zeros_like(logits).scatter(-1, chosen, best.softmax(-1))
        # One product for all experts: [B T, H] x [H, E 2I].
        rows = x.flatten(0, 1)
        up = rows @ fake_quantize(self.gate_up_proj).flatten(0, 1).T + self.gate_up_bias.flatten()
        up = up.unflatten(-1, (config.num_experts, -1))
        gate, linear_part = up[..., 0::2], up[..., 1::2]
        gate = gate.clamp(max=config.swiglu_limit)
        linear_part = linear_part.clamp(-config.swiglu_limit, config.swiglu_limit)
        act = gate * torch.sigmoid(config.swiglu_alpha * gate) * (linear_part + 1)
        # The weighted sum over experts is one product too: [B T, E I] x [E I, H].
        row_weight = weight.flatten(0, 1)
        act = (act * row_weight[..., None]).flatten(1)
        down = act @ fake_quantize(self.down_proj).transpose(1, 2).flatten(0, 1)
        down = down + row_weight @ self.down_bias
        # Keeps the router from sending everything to the same few experts.
        share = logits.softmax(-1).mean((0, 1))
        load = (weight > 0).float().mean((0, 1)) / config.experts_per_token
        balance = config.num_experts * (share * load).sum()
        return down.view_as(x), balance

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attend(self.norm(x, self.input_layernorm), cos, sin)
        out, balance = self.experts(self.norm(x, self.post_attention_layernorm))
        return x + out, balance


class TrainableGptOss(nn.Module):
    """Tokens [B, T] to logits [B, T, V] and the mean balance loss of the routers."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList(Block(config, w) for w in config.window_tokens)
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.lm_head = nn.Parameter(
            torch.randn(config.vocab_size, config.hidden_size) / math.sqrt(config.hidden_size)
        )
        self.frequencies, self.concentration = yarn_frequencies(config)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        angle = torch.outer(place, self.frequencies.float().to(tokens.device))
        cos, sin = angle.cos() * self.concentration, angle.sin() * self.concentration
        x = self.embed_tokens[tokens]
        balances = []
        for block in self.blocks:
            x, balance = block(x, cos, sin)
            balances.append(balance)
        return linear(self.blocks[0].norm(x, self.norm), self.lm_head), torch.stack(balances).mean()

    def checkpoint(self) -> dict[str, Tensor]:
        """Tensors under Hugging Face names; expert matrices [E, out, in], still float."""
        tensors = {
            "model.embed_tokens.weight": self.embed_tokens,
            "model.norm.weight": self.norm,
            "lm_head.weight": self.lm_head,
        }
        for i, block in enumerate(self.blocks):
            p = f"model.layers.{i}."
            tensors[p + "input_layernorm.weight"] = block.input_layernorm
            tensors[p + "post_attention_layernorm.weight"] = block.post_attention_layernorm
            for name in "qkvo":
                tensors[p + f"self_attn.{name}_proj.weight"] = getattr(block, f"{name}_proj")
                tensors[p + f"self_attn.{name}_proj.bias"] = getattr(block, f"{name}_bias")
            tensors[p + "self_attn.sinks"] = block.sinks
            tensors[p + "mlp.router.weight"] = block.router
            tensors[p + "mlp.router.bias"] = block.router_bias
            tensors[p + "mlp.experts.gate_up_proj"] = block.gate_up_proj
            tensors[p + "mlp.experts.gate_up_proj_bias"] = block.gate_up_bias
            tensors[p + "mlp.experts.down_proj"] = block.down_proj
            tensors[p + "mlp.experts.down_proj_bias"] = block.down_bias
        return {name: t.detach() for name, t in tensors.items()}
