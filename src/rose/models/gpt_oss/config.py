"""The configuration of gpt-oss: the 20b, the 120b and any smaller shape, read from either config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose.config.model import ModelConfig
from rose.utils.errors import CheckpointError

SWIGLU_ALPHA = 1.702
"""In no config.json; a constant of the architecture."""
EOS_TOKEN_IDS = (200002, 199999, 200012)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(ModelConfig):
    """Sizes and constants; names of our own, sources in `from_json`."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    swiglu_limit: float = 7.0
    swiglu_alpha: float = SWIGLU_ALPHA
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_scaling_factor: float = 32.0
    rope_original_tokens: int = 4096
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> GptOssConfig:
        """Read a Hugging Face or an OpenAI `original/` config.json, already parsed.

        Raises  CheckpointError listing every missing or contradictory field.
        """
        return _from_hugging_face(values) if "model_type" in values else _from_original(values)


def alternating_windows(num_layers: int, window_tokens: int) -> tuple[int | None, ...]:
    """Even layers see a window, odd layers everything."""
    return tuple(window_tokens if i % 2 == 0 else None for i in range(num_layers))


def _take(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    missing = [theirs for theirs in names.values() if theirs not in values]
    if missing:
        raise CheckpointError(
            f"config.json lacks {', '.join(missing)}; a gpt-oss configuration needs them; "
            "restore the file from the checkpoint's source"
        )
    return {ours: values[theirs] for ours, theirs in names.items()}


def _from_hugging_face(values: dict[str, Any]) -> GptOssConfig:
    if values["model_type"] != "gpt_oss":
        raise CheckpointError(
            f"config.json says model_type {values['model_type']!r}; supported: gpt_oss; choose another model folder"
        )
    sizes = _take(
        values,
        {
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_q_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "head_dim": "head_dim",
            "intermediate_size": "intermediate_size",
            "num_experts": "num_local_experts",
        },
    )
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    problems = []
    if rope.get("rope_type", "yarn") != "yarn":
        problems.append(f"rope_type {rope['rope_type']!r}; supported: yarn")
    if rope.get("truncate", False):
        problems.append(
            "rope truncate is true; gpt-oss uses YaRN without truncation (truncate: false)"
        )
    if values.get("tie_word_embeddings", False):
        problems.append("tie_word_embeddings is true; gpt-oss has a separate output head")
    layer_types = values.get("layer_types")
    window = values.get("sliding_window", 128)
    if layer_types is None:
        windows = alternating_windows(sizes["num_layers"], window)
    else:
        unknown = sorted(set(layer_types) - {"sliding_attention", "full_attention"})
        if unknown or len(layer_types) != sizes["num_layers"]:
            problems.append(
                f"layer_types has {len(layer_types)} entries of kinds {sorted(set(layer_types))}; "
                f"needed: {sizes['num_layers']} of sliding_attention or full_attention"
            )
        windows = tuple(window if t == "sliding_attention" else None for t in layer_types)
    if problems:
        raise CheckpointError(problems)
    factor = float(rope.get("factor", 32.0))
    original = int(
        rope.get("original_max_position_embeddings", values.get("initial_context_length", 4096))
    )
    eos = values.get("eos_token_id")
    eos_ids = (
        tuple(eos) if isinstance(eos, list) else EOS_TOKEN_IDS if eos in (None, 200002) else (eos,)
    )
    return GptOssConfig(
        architecture="gpt_oss",
        **sizes,
        experts_per_token=values.get("num_experts_per_tok", values.get("experts_per_token", 4)),
        context_tokens=values.get("max_position_embeddings", int(original * factor)),
        window_tokens=windows,
        eos_token_ids=tuple(t for t in eos_ids if t < sizes["vocab_size"]),
        swiglu_limit=values.get("swiglu_limit", 7.0),
        rms_norm_eps=values.get("rms_norm_eps", 1e-5),
        rope_theta=float(rope.get("rope_theta", values.get("rope_theta", 150000.0))),
        rope_scaling_factor=factor,
        rope_original_tokens=original,
        rope_beta_fast=float(rope.get("beta_fast", 32.0)),
        rope_beta_slow=float(rope.get("beta_slow", 1.0)),
    )


def _from_original(values: dict[str, Any]) -> GptOssConfig:
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_q_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "intermediate_size": "intermediate_size",
        "num_experts": "num_experts",
        "experts_per_token": "experts_per_token",
    }
    sizes = _take(values, names)
    original = int(values.get("initial_context_length", 4096))
    factor = float(values.get("rope_scaling_factor", 32.0))
    return GptOssConfig(
        architecture="gpt_oss",
        **sizes,
        context_tokens=int(original * factor),
        window_tokens=alternating_windows(sizes["num_layers"], values.get("sliding_window", 128)),
        eos_token_ids=tuple(t for t in EOS_TOKEN_IDS if t < sizes["vocab_size"]),
        swiglu_limit=values.get("swiglu_limit", 7.0),
        rope_theta=float(values.get("rope_theta", 150000.0)),
        rope_scaling_factor=factor,
        rope_original_tokens=original,
        rope_beta_fast=float(values.get("rope_ntk_beta", 32.0)),
        rope_beta_slow=float(values.get("rope_ntk_alpha", 1.0)),
    )


def published(size: str) -> GptOssConfig:
    """Return the configuration of the published 20b or 120b."""
    num_layers, num_experts = {"20b": (24, 32), "120b": (36, 128)}[size]
    return GptOssConfig(
        architecture="gpt_oss",
        vocab_size=201088,
        hidden_size=2880,
        num_layers=num_layers,
        num_q_heads=64,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=2880,
        num_experts=num_experts,
        experts_per_token=4,
        context_tokens=131072,
        window_tokens=alternating_windows(num_layers, 128),
        eos_token_ids=EOS_TOKEN_IDS,
    )
