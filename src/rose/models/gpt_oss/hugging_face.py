"""The JSON files beside the weights, in Hugging Face's words: config.json and generation_config.json."""

from __future__ import annotations

from typing import Any

from rose.models.gpt_oss.config import GptOssConfig

PAD_TOKEN_ID = 199999
BOS_TOKEN_ID = 199998
_UNQUANTISED = [
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
]


def quantization_config(format_name: str) -> dict[str, Any] | None:
    """Describe a weight format; None for plain ones."""
    if format_name == "mxfp4":
        return {"quant_method": "mxfp4", "modules_to_not_convert": _UNQUANTISED}
    if not format_name.startswith("fp8_block"):
        return None
    whole = format_name == "fp8_block_all"
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "scale_fmt": "power_of_two",
        "activation_scheme": "dynamic",
        "rose_format": format_name,
        "modules_to_not_convert": _UNQUANTISED[1:3] if whole else _UNQUANTISED,
    }


def with_quantization(values: dict[str, Any], format_name: str) -> dict[str, Any]:
    """Return a config.json that describes a copy of the model in another format."""
    dropped = ("quantization_config", "torch_dtype", "dtype")
    values = {key: value for key, value in values.items() if key not in dropped}
    values["dtype"] = "bfloat16"
    described = quantization_config(format_name)
    return values if described is None else {**values, "quantization_config": described}


def config_json(config: GptOssConfig) -> dict[str, Any]:
    """Write a configuration out as transformers reads it, without a format."""
    windows = [w for w in config.window_tokens if w is not None]
    eos = [t for t in config.eos_token_ids if t < config.vocab_size]
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": eos[0] if eos else None,
        "experts_per_token": config.experts_per_token,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initial_context_length": config.rope_original_tokens,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": [
            "full_attention" if w is None else "sliding_attention" for w in config.window_tokens
        ],
        "max_position_embeddings": config.context_tokens,
        "model_type": "gpt_oss",
        "num_attention_heads": config.num_q_heads,
        "num_experts_per_tok": config.experts_per_token,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "num_local_experts": config.num_experts,
        "output_router_logits": False,
        "pad_token_id": PAD_TOKEN_ID if config.vocab_size > PAD_TOKEN_ID else None,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": {
            "beta_fast": config.rope_beta_fast,
            "beta_slow": config.rope_beta_slow,
            "factor": config.rope_scaling_factor,
            "original_max_position_embeddings": config.rope_original_tokens,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": config.rope_theta,
        "router_aux_loss_coef": 0.9,
        "sliding_window": windows[0] if windows else 128,
        "swiglu_limit": config.swiglu_limit,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def generation_json(config: GptOssConfig) -> dict[str, Any]:
    """Write the sampling defaults; ids beyond the vocabulary are left out."""
    values: dict[str, Any] = {"do_sample": True, "eos_token_id": list(config.eos_token_ids)}
    for name, token in (("bos_token_id", BOS_TOKEN_ID), ("pad_token_id", PAD_TOKEN_ID)):
        if token < config.vocab_size:
            values[name] = token
    return values
