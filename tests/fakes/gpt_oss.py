"""Tiny gpt-oss models for tests: configurations, weights in published names, ways to run them."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.config.engine import KernelsConfig
from rose.config.quant import QuantConfig
from rose.kernels.formats import plain
from rose.kernels.weights import ExpertWeights, LinearWeights
from rose.layers.build import LayerBuild
from rose.layers.own_pages import OwnPages
from rose.models.gpt_oss.config import GptOssConfig, alternating_windows
from rose.models.gpt_oss.model import GptOss
from rose.models.gpt_oss.parameters import GptOssParameters, LayerParameters
from rose.models.gpt_oss.reference import ReferenceConfig

NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bf16"}


def config(**changes: object) -> GptOssConfig:
    """The configuration of the published end-to-end vector, with changes."""
    sizes = {
        "vocab_size": 50,
        "hidden_size": 64,
        "num_layers": 2,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "experts_per_token": 2,
        "intermediate_size": 64,
        "window": 4,
    } | changes
    window = sizes.pop("window")
    return GptOssConfig(
        architecture="gpt_oss",
        context_tokens=131072,
        window_tokens=alternating_windows(sizes["num_layers"], window),
        **sizes,
    )


def hashed(tensor_number: int, shape: tuple[int, ...], scale: float) -> Tensor:
    """Numbers in -scale .. scale from a hash, float64: the generator of the published vectors."""
    count = torch.Size(shape).numel()
    mask = 0xFFFFFFFF
    u = (torch.arange(count) * 2654435761 + tensor_number * 40503 + 12345) & mask
    for _ in range(2):
        u = ((u ^ (u >> 16)) * 0x45D9F3B) & mask
    u = u ^ (u >> 16)
    return ((u.double() / 2**32 - 0.5) * 2 * scale).view(shape)


def original_shapes(c: GptOssConfig) -> list[tuple[str, tuple[int, ...], float, float]]:
    """(name in OpenAI's layout, shape, scale, what is added), in the order of the published vector."""
    d, inner, experts = c.hidden_size, c.intermediate_size, c.num_experts
    width, qkv = c.num_q_heads * c.head_dim, (c.num_q_heads + 2 * c.num_kv_heads) * c.head_dim
    rows = [("embedding.weight", (c.vocab_size, d), 1.0, 0.0)]
    for n in range(c.num_layers):
        rows += [
            (f"block.{n}.attn.norm.scale", (d,), 0.3, 1.0),
            (f"block.{n}.attn.qkv.weight", (qkv, d), 0.3, 0.0),
            (f"block.{n}.attn.qkv.bias", (qkv,), 0.3, 0.0),
            (f"block.{n}.attn.sinks", (c.num_q_heads,), 1.0, 0.0),
            (f"block.{n}.attn.out.weight", (d, width), 0.3, 0.0),
            (f"block.{n}.attn.out.bias", (d,), 0.3, 0.0),
            (f"block.{n}.mlp.norm.scale", (d,), 0.3, 1.0),
            (f"block.{n}.mlp.gate.weight", (experts, d), 0.3, 0.0),
            (f"block.{n}.mlp.gate.bias", (experts,), 0.3, 0.0),
            (f"block.{n}.mlp.mlp1_weight", (experts, 2 * inner, d), 0.5, 0.0),
            (f"block.{n}.mlp.mlp1_bias", (experts, 2 * inner), 0.5, 0.0),
            (f"block.{n}.mlp.mlp2_weight", (experts, d, inner), 0.3, 0.0),
            (f"block.{n}.mlp.mlp2_bias", (experts, d), 0.3, 0.0),
        ]
    return [
        *rows,
        ("norm.scale", (d,), 0.3, 1.0),
        ("unembedding.weight", (c.vocab_size, d), 0.3, 0.0),
    ]


def hashed_weights(c: GptOssConfig, dtype: torch.dtype, *, first: int = 0) -> dict[str, Tensor]:
    """All weights in OpenAI's names; `first` numbers the first tensor, so that it serves as a seed."""
    return {
        name: (hashed(first + t, shape, scale) + added).to(dtype)
        for t, (name, shape, scale, added) in enumerate(original_shapes(c))
    }


def parameters(c: GptOssConfig, w: dict[str, Tensor]) -> GptOssParameters:
    """The tree that layers take, from OpenAI's names; norms and sinks at least float32."""

    def wide(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else tensor.float()

    def linear(name: str) -> LinearWeights:
        return LinearWeights(matrix=plain(w[f"{name}.weight"]), bias_N=w.get(f"{name}.bias"))

    def layer(n: int) -> LayerParameters:
        at = f"block.{n}."
        return LayerParameters(
            attention_norm_D=wide(w[at + "attn.norm.scale"]),
            qkv=linear(at + "attn.qkv"),
            sinks_H=wide(w[at + "attn.sinks"]),
            out=linear(at + "attn.out"),
            expert_norm_D=wide(w[at + "mlp.norm.scale"]),
            router=linear(at + "mlp.gate"),
            experts=ExpertWeights(
                gate_up=plain(w[at + "mlp.mlp1_weight"]),
                gate_up_bias_EF=w[at + "mlp.mlp1_bias"],
                down=plain(w[at + "mlp.mlp2_weight"]),
                down_bias_ED=w[at + "mlp.mlp2_bias"],
            ),
        )

    return GptOssParameters(
        embedding_VD=w["embedding.weight"],
        layers=tuple(layer(n) for n in range(c.num_layers)),
        final_norm_D=wide(w["norm.scale"]),
        head=linear("unembedding"),
    )


def build(
    c: GptOssConfig,
    p: GptOssParameters,
    dtype: torch.dtype,
    *,
    page_tokens: int = 16,
    kv: str | None = None,
    **kernels: object,
) -> GptOss:
    """The model with every call held against its contract; `kv`: format of its cache, else that of activations."""
    quant = QuantConfig(weights="float32", activations=NAMES[dtype], kv=kv or NAMES[dtype])
    build = LayerBuild(quant=quant, kernels=KernelsConfig(check_calls=True, **kernels))
    return GptOss(c, p, build=build, page_tokens=page_tokens, num_positions=8192)


def pages(
    model: GptOss, max_tokens: int, *, num_sequences: int = 1, device: str = "cpu"
) -> OwnPages:
    """Empty KV for a few sequences."""
    return OwnPages(
        model.config,
        num_sequences=num_sequences,
        max_tokens=max_tokens,
        page_tokens=model.page_tokens,
        dtype=model.kv_dtype,
        device=device,
    )


@torch.inference_mode()
def run(model: GptOss, tokens: Tensor, chunks: list[int] | None = None) -> Tensor:
    """Logits [T, V] of one prompt, in chunks; a chunk of 0 is one decode step of one token."""
    own, rows, begin = pages(model, len(tokens)), [], 0
    for chunk in chunks or [len(tokens)]:
        count = max(chunk, 1)
        context = own.step(prefill=[(0, chunk)]) if chunk else own.step(decode=[0])
        rows.append(model.logits(model.forward(tokens[begin : begin + count], context)))
        begin += count
    assert begin == len(tokens), "the chunks cover the prompt"
    return torch.cat(rows)


def reference_config(c: GptOssConfig) -> ReferenceConfig:
    """The same numbers for the reference model."""
    return ReferenceConfig(
        num_layers=c.num_layers,
        num_q_heads=c.num_q_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        experts_per_token=c.experts_per_token,
        window_tokens=c.window_tokens[0],
    )


def relative(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
