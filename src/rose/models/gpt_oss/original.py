"""Parameters of the served model in the names of OpenAI's checkpoints, as `reference.py` takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rose.kernels.formats import FormattedTensor
from rose.models.gpt_oss import reference
from rose.models.gpt_oss.config import GptOssConfig
from rose.models.gpt_oss.parameters import GptOssParameters


def weights_of(parameters: GptOssParameters, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a parameter tree in the reference's names, expanded to plain numbers."""

    def number(tensor: Tensor | FormattedTensor | None) -> Tensor:
        assert tensor is not None
        return (tensor.to_float() if isinstance(tensor, FormattedTensor) else tensor).to(dtype)

    named: dict[str, Any] = {
        "embedding.weight": parameters.embedding_VD,
        "norm.scale": parameters.final_norm_D,
        "unembedding.weight": parameters.head.matrix,
    }
    for n, layer in enumerate(parameters.layers):
        at = f"block.{n}."
        named |= {
            at + "attn.norm.scale": layer.attention_norm_D,
            at + "attn.qkv.weight": layer.qkv.matrix,
            at + "attn.qkv.bias": layer.qkv.bias_N,
            at + "attn.sinks": layer.sinks_H,
            at + "attn.out.weight": layer.out.matrix,
            at + "attn.out.bias": layer.out.bias_N,
            at + "mlp.norm.scale": layer.expert_norm_D,
            at + "mlp.gate.weight": layer.router.matrix,
            at + "mlp.gate.bias": layer.router.bias_N,
            at + "mlp.mlp1_weight": layer.experts.gate_up,
            at + "mlp.mlp1_bias": layer.experts.gate_up_bias_EF,
            at + "mlp.mlp2_weight": layer.experts.down,
            at + "mlp.mlp2_bias": layer.experts.down_bias_ED,
        }
    return {name: number(tensor) for name, tensor in named.items()}


def reference_config(config: GptOssConfig) -> reference.ReferenceConfig:
    """Return the same numbers for the reference; its layers alternate as the published ones do."""
    window = config.window_tokens[0]
    assert window is not None, "layer 0 of gpt-oss sees a window"
    return reference.ReferenceConfig(
        num_layers=config.num_layers,
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        experts_per_token=config.experts_per_token,
        window_tokens=window,
    )
