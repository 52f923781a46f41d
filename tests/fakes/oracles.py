"""Other people's gpt-oss, given our tiny weights: transformers', and OpenAI's torch model."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.models.gpt_oss.config import GptOssConfig


def transformers_model(c: GptOssConfig, w: dict[str, Tensor]) -> torch.nn.Module:
    """Build GptOssForCausalLM with these weights, eager attention."""
    from transformers import GptOssConfig as TheirConfig
    from transformers import GptOssForCausalLM

    theirs = TheirConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_q_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        num_local_experts=c.num_experts,
        num_experts_per_tok=c.experts_per_token,
        sliding_window=c.window_tokens[0],
        pad_token_id=0,
        attn_implementation="eager",
    )
    model = GptOssForCausalLM(theirs).to(w["norm.scale"].dtype).eval()
    model.load_state_dict(transformers_names(c, w))
    return model


def transformers_names(c: GptOssConfig, w: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename; q, k, v apart; expert matrices the other way round."""
    split = [n * c.head_dim for n in (c.num_q_heads, c.num_kv_heads, c.num_kv_heads)]
    named = {
        "model.embed_tokens.weight": w["embedding.weight"],
        "model.norm.weight": w["norm.scale"],
        "lm_head.weight": w["unembedding.weight"],
    }
    for n in range(c.num_layers):
        ours, theirs = f"block.{n}.", f"model.layers.{n}."
        for part in ("weight", "bias"):
            for name, rows in zip("qkv", w[f"{ours}attn.qkv.{part}"].split(split), strict=True):
                named[f"{theirs}self_attn.{name}_proj.{part}"] = rows.clone()
            named[f"{theirs}self_attn.o_proj.{part}"] = w[f"{ours}attn.out.{part}"]
            named[f"{theirs}mlp.router.{part}"] = w[f"{ours}mlp.gate.{part}"]
        named |= {
            f"{theirs}input_layernorm.weight": w[ours + "attn.norm.scale"],
            f"{theirs}post_attention_layernorm.weight": w[ours + "mlp.norm.scale"],
            f"{theirs}self_attn.sinks": w[ours + "attn.sinks"],
            f"{theirs}mlp.experts.gate_up_proj": w[ours + "mlp.mlp1_weight"].mT.contiguous(),
            f"{theirs}mlp.experts.gate_up_proj_bias": w[ours + "mlp.mlp1_bias"],
            f"{theirs}mlp.experts.down_proj": w[ours + "mlp.mlp2_weight"].mT.contiguous(),
            f"{theirs}mlp.experts.down_proj_bias": w[ours + "mlp.mlp2_bias"],
        }
    return named


def openai_model(c: GptOssConfig, w: dict[str, Tensor]) -> torch.nn.Module:
    """Build OpenAI's Transformer with these weights, widened to their dtype.

    Raises  ImportError where the gpt-oss package is not installed
    """
    from gpt_oss.torch.model import ModelConfig, Transformer

    theirs = ModelConfig(
        num_hidden_layers=c.num_layers,
        num_experts=c.num_experts,
        experts_per_token=c.experts_per_token,
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        head_dim=c.head_dim,
        num_attention_heads=c.num_q_heads,
        num_key_value_heads=c.num_kv_heads,
        sliding_window=c.window_tokens[0],
    )
    model = Transformer(theirs).to(w["norm.scale"].dtype)
    model.load_state_dict(w)
    return model
