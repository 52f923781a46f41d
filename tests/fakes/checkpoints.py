"""Tiny gpt-oss checkpoints in every published layout, from the same numbers, written without rose's own tables.

`numbers` makes a checkpoint in OpenAI's names (MXFP4 codes and all); the writers turn it into the other layouts with
names and decoding spelled out here, so that they are an oracle for the loader.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from rose.models.gpt_oss.config import GptOssConfig, alternating_windows

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def config(**changes):
    """H = I, so that a forgotten transpose raises no shape error; 160 and 192 rows leave ragged tiles."""
    sizes = {
        "vocab_size": 300,
        "hidden_size": 160,
        "num_layers": 2,
        "num_q_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "experts_per_token": 2,
        "intermediate_size": 160,
    } | changes
    return GptOssConfig(
        architecture="gpt_oss",
        context_tokens=131072,
        window_tokens=alternating_windows(sizes["num_layers"], 128),
        eos_token_ids=(),
        **sizes,
    )


def numbers(c, seed=0, *, span=2):
    """Make a checkpoint in OpenAI's names: bf16, and uint8 for expert blocks and scales."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, std=0.1, mean=0.0):
        return (mean + std * torch.randn(shape, generator=g)).bfloat16()

    def codes(*shape, high=256, low=0):
        return torch.randint(low, high, shape, generator=g, dtype=torch.uint8)

    d, inner, e = c.hidden_size, c.intermediate_size, c.num_experts
    q, kv = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    tensors = {"embedding.weight": normal(c.vocab_size, d, std=1.0)}
    for n in range(c.num_layers):
        tensors |= {
            f"block.{n}.attn.norm.scale": normal(d, mean=1.0),
            f"block.{n}.attn.qkv.weight": normal(q + 2 * kv, d),
            f"block.{n}.attn.qkv.bias": normal(q + 2 * kv),
            f"block.{n}.attn.sinks": normal(c.num_q_heads, std=1.0),
            f"block.{n}.attn.out.weight": normal(d, q),
            f"block.{n}.attn.out.bias": normal(d),
            f"block.{n}.mlp.norm.scale": normal(d, mean=1.0),
            f"block.{n}.mlp.gate.weight": normal(e, d),
            f"block.{n}.mlp.gate.bias": normal(e),
            f"block.{n}.mlp.mlp1_weight.blocks": codes(e, 2 * inner, d // 32, 16),
            f"block.{n}.mlp.mlp1_weight.scales": codes(
                e, 2 * inner, d // 32, low=119, high=120 + span
            ),
            f"block.{n}.mlp.mlp1_bias": normal(e, 2 * inner),
            f"block.{n}.mlp.mlp2_weight.blocks": codes(e, d, inner // 32, 16),
            f"block.{n}.mlp.mlp2_weight.scales": codes(e, d, inner // 32, low=119, high=120 + span),
            f"block.{n}.mlp.mlp2_bias": normal(e, d),
        }
    tensors["norm.scale"] = normal(d, mean=1.0)
    tensors["unembedding.weight"] = normal(c.vocab_size, d)
    return tensors


def expand(blocks, scales):
    """Decode MXFP4 element by element: low nibble first, 2^(scale - 127)."""
    table = torch.tensor(E2M1, dtype=torch.float64)
    low, high = table[(blocks & 15).long()], table[(blocks >> 4).long()]
    pairs = torch.stack([low, high], dim=-1).flatten(-2)
    powers = torch.pow(torch.tensor(2.0, dtype=torch.float64), scales.double() - 127)
    return (pairs * powers[..., None]).flatten(-2).float()


def hugging_face(c, original, *, is_expanded=False):
    """Rename to Hugging Face's names, cutting qkv; experts as MXFP4 or as bf16 [in, out]."""
    q, kv = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    out = {
        "model.embed_tokens.weight": original["embedding.weight"],
        "model.norm.weight": original["norm.scale"],
        "lm_head.weight": original["unembedding.weight"],
    }
    for n in range(c.num_layers):
        a, b = f"block.{n}.", f"model.layers.{n}."
        for kind in ("weight", "bias"):
            parts = original[f"{a}attn.qkv.{kind}"].split([q, kv, kv])
            for letter, part in zip("qkv", parts, strict=True):
                out[f"{b}self_attn.{letter}_proj.{kind}"] = part
            out[f"{b}self_attn.o_proj.{kind}"] = original[f"{a}attn.out.{kind}"]
            out[f"{b}mlp.router.{kind}"] = original[f"{a}mlp.gate.{kind}"]
        out[b + "input_layernorm.weight"] = original[a + "attn.norm.scale"]
        out[b + "post_attention_layernorm.weight"] = original[a + "mlp.norm.scale"]
        out[b + "self_attn.sinks"] = original[a + "attn.sinks"]
        for theirs, ours in (("mlp1", "gate_up_proj"), ("mlp2", "down_proj")):
            blocks = original[f"{a}mlp.{theirs}_weight.blocks"]
            scales = original[f"{a}mlp.{theirs}_weight.scales"]
            if is_expanded:
                out[f"{b}mlp.experts.{ours}"] = expand(blocks, scales).transpose(1, 2).bfloat16()
            else:
                out[f"{b}mlp.experts.{ours}_blocks"] = blocks
                out[f"{b}mlp.experts.{ours}_scales"] = scales
            out[f"{b}mlp.experts.{ours}_bias"] = original[f"{a}mlp.{theirs}_bias"]
    return {name: tensor.contiguous() for name, tensor in out.items()}


def original_json(c):
    """config.json as OpenAI writes it."""
    return {
        "num_hidden_layers": c.num_layers,
        "num_experts": c.num_experts,
        "experts_per_token": c.experts_per_token,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "swiglu_limit": 7.0,
        "head_dim": c.head_dim,
        "num_attention_heads": c.num_q_heads,
        "num_key_value_heads": c.num_kv_heads,
        "sliding_window": 128,
        "initial_context_length": 4096,
        "rope_theta": 150000,
        "rope_scaling_factor": 32.0,
        "rope_ntk_alpha": 1,
        "rope_ntk_beta": 32.0,
    }


def hugging_face_json(c):
    """config.json as published."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": c.num_layers,
        "num_local_experts": c.num_experts,
        "num_experts_per_tok": c.experts_per_token,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "head_dim": c.head_dim,
        "num_attention_heads": c.num_q_heads,
        "num_key_value_heads": c.num_kv_heads,
        "eos_token_id": None,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    }


def write(folder: Path, tensors, json_config, *, num_files=1, naming="one", with_index=True):
    """Save tensors over files named as published.

    `one`: model-00001-of-00003, `zero`: model-00000-of-00002 for three files, `dashes`: model--00001-of-00003.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(json_config))
    names = sorted(tensors)
    first, total, dash = {
        "one": (1, num_files, "-"),
        "zero": (0, num_files - 1, "-"),
        "dashes": (1, num_files, "--"),
    }[naming]
    weight_map = {}
    for i in range(num_files):
        file = f"model{dash}{first + i:05d}-of-{total:05d}.safetensors"
        if num_files == 1:
            file = "model.safetensors"
        mine = names[i::num_files]  # layers straddle files, as published
        save_file({n: tensors[n] for n in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    if with_index:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_layout(folder: Path, c, original, layout):
    """Write `mxfp4` or `bf16` in Hugging Face's layout, or `original`."""
    if layout == "original":
        return write(
            folder, original, original_json(c), num_files=2, naming="dashes", with_index=False
        )
    tensors = hugging_face(c, original, is_expanded=layout == "bf16")
    return write(folder, tensors, hugging_face_json(c), num_files=3, naming="zero")
