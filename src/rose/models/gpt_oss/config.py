"""The configuration of gpt-oss: the 20b, the 120b and any smaller shape, read from either config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rose.config.model import ModelConfig
from rose.utils.errors import CheckpointError

SWIGLU_ALPHA = 1.702
"""In no config.json; a constant of the architecture."""
EOS_TOKEN_IDS = (200002, 199999, 200012)
MOST = {
    "num_layers": 1 << 12,
    "num_experts": 1 << 16,
    "experts_per_token": 1 << 16,
    "num_q_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 24,
    "context_tokens": 1 << 26,
    "rope_original_tokens": 1 << 26,
}
"""Guessed, far past any model: a damaged number is answered before tables of its size are made."""


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
        config = _from_hugging_face(values) if "model_type" in values else _from_original(values)
        _require(_contradictions(config))
        return config


def alternating_windows(num_layers: int, window_tokens: int | None) -> tuple[int | None, ...]:
    """Even layers see a window, odd layers everything."""
    return tuple(window_tokens if i % 2 == 0 else None for i in range(num_layers))


def _require(problems: list[str]) -> None:
    if problems:
        raise CheckpointError(
            [f"{line}; restore the file from the checkpoint's source" for line in problems]
        )


def _count_problems(counts: dict[str, Any]) -> list[str]:
    return [
        f"{name} is {value!r}; needed: a whole number of at least 1, at most {MOST[name]}"
        for name, value in counts.items()
        if not _is_whole(value, 1, MOST[name])
    ]


def _contradictions(c: GptOssConfig) -> list[str]:
    """List what no model can have, so that it is said here and not found as a traceback in a layer."""
    problems = _count_problems({name: getattr(c, name) for name in MOST})
    if problems:
        return problems
    if c.num_q_heads % c.num_kv_heads:
        problems.append(
            f"{c.num_q_heads} query heads cannot share {c.num_kv_heads} kv heads evenly"
        )
    if c.head_dim % 2:
        problems.append(f"head_dim is {c.head_dim}; needed: an even number, rotary turns pairs")
    if c.experts_per_token > c.num_experts:
        problems.append(f"{c.experts_per_token} experts per token of {c.num_experts} are too many")
    for window in sorted({w for w in c.window_tokens if w is not None}, key=str):
        if not _is_whole(window, 1, MOST["context_tokens"]):
            problems.append(
                f"sliding_window is {window!r}; needed: a whole number of at least 1, at most {MOST['context_tokens']}"
            )
    for name, least in (
        ("swiglu_limit", 0.0),
        ("rms_norm_eps", 0.0),
        ("rope_theta", 1.0),
        ("rope_beta_slow", 0.0),
    ):
        value = getattr(c, name)
        if not _is_number(value) or not value > least:
            problems.append(f"{name} is {value!r}; needed: a number above {least:g}")
    if not _is_number(c.rope_scaling_factor) or c.rope_scaling_factor < 1:
        problems.append(f"rope factor is {c.rope_scaling_factor!r}; needed: a number of at least 1")
    if not _is_number(c.rope_beta_fast) or not c.rope_beta_fast > c.rope_beta_slow:
        problems.append(
            f"rope beta_fast is {c.rope_beta_fast!r}; needed: a number above beta_slow ({c.rope_beta_slow!r})"
        )
    return problems


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _eos_ids(value: Any) -> tuple[int, ...]:
    """Read eos_token_id: absent or the published one stands for all three that end gpt-oss's turns."""
    if value in (None, 200002):
        return EOS_TOKEN_IDS
    ids = value if isinstance(value, list) else [value]
    most = MOST["vocab_size"] - 1
    if not all(_is_whole(t, 0, most) for t in ids):
        _require([f"eos_token_id is {value!r}; needed: token ids, whole numbers from 0 to {most}"])
    return tuple(ids)


def _take(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    missing = [theirs for theirs in names.values() if theirs not in values]
    if missing:
        raise CheckpointError(
            f"config.json lacks {', '.join(missing)}; a gpt-oss configuration needs them; "
            "restore the file from the checkpoint's source"
        )
    sizes = {ours: values[theirs] for ours, theirs in names.items()}
    _require(_count_problems(sizes))
    return sizes


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
    problems = [
        f"{name} is {values[name]!r}; needed: an object"
        for name in ("rope_parameters", "rope_scaling")
        if not isinstance(values.get(name), dict | None)
    ]
    _require(problems)
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if rope.get("rope_type", "yarn") != "yarn":
        problems.append(f"rope_type {rope['rope_type']!r}; supported: yarn")
    if rope.get("truncate") not in (None, False):
        problems.append(
            f"rope truncate is {rope['truncate']!r}; gpt-oss uses YaRN without truncation (truncate: false)"
        )
    if values.get("tie_word_embeddings") not in (None, False):
        problems.append(
            f"tie_word_embeddings is {values['tie_word_embeddings']!r}; gpt-oss has a separate output head "
            "(tie_word_embeddings: false)"
        )
    if values.get("attention_bias", True) is not True:
        problems.append(
            f"attention_bias is {values['attention_bias']!r}; gpt-oss has biases (attention_bias: true)"
        )
    # Published as "silu", which is not what the model does: the clamped SwiGLU has no name of its own.
    if values.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act is {values['hidden_act']!r}; published and supported: silu")
    layer_types = values.get("layer_types")
    window = values.get("sliding_window", 128)
    if not isinstance(layer_types, list | None):
        _require([*problems, f"layer_types is {layer_types!r}; needed: a list, one kind a layer"])
    if window is None and (layer_types is None or "sliding_attention" in layer_types):
        problems.append("sliding_window is null; needed: the tokens that sliding layers see")
    if layer_types is None:
        windows = alternating_windows(sizes["num_layers"], window)
    else:
        kinds = sorted(set(map(str, layer_types)))
        unknown = set(kinds) - {"sliding_attention", "full_attention"}
        if unknown or len(layer_types) != sizes["num_layers"]:
            problems.append(
                f"layer_types has {len(layer_types)} entries of kinds {kinds[:8]}; "
                f"needed: {sizes['num_layers']} of sliding_attention or full_attention"
            )
        windows = tuple(window if t == "sliding_attention" else None for t in layer_types)
    if problems:
        raise CheckpointError(problems)
    factor = float(rope.get("factor", 32.0))
    original = int(
        rope.get("original_max_position_embeddings", values.get("initial_context_length", 4096))
    )
    return GptOssConfig(
        architecture="gpt_oss",
        **sizes,
        experts_per_token=values.get("num_experts_per_tok", values.get("experts_per_token", 4)),
        context_tokens=values.get("max_position_embeddings", int(original * factor)),
        window_tokens=windows,
        eos_token_ids=tuple(
            t for t in _eos_ids(values.get("eos_token_id")) if t < sizes["vocab_size"]
        ),
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


def tiny() -> GptOssConfig:
    """Return the configuration of the embedded model: what "tiny" means everywhere.

    Its vocabulary is that of the embedded tokenizer.json. Head size, window and experts per token are the published
    ones; 320 is no multiple of 128, so tails are exercised.
    """
    return GptOssConfig(
        architecture="gpt_oss",
        vocab_size=3072,
        hidden_size=320,
        num_layers=6,
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=320,
        num_experts=8,
        experts_per_token=4,
        context_tokens=131072,
        window_tokens=alternating_windows(6, 128),
        eos_token_ids=(2, 1, 8),
    )
