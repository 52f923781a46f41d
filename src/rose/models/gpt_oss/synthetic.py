"""gpt-oss with made-up weights: any size, in any resident format, drawn on the device from a seed.

For measuring and for tests. Nothing passes through the host, so the 120b takes seconds on a GPU. Scales are
such that the residual stream stays between 1 and 10 in root mean square and all experts are in use, so that
kernels meet the numbers, and the spread of routing, of a trained model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rose.config.engine import EngineConfig
from rose.config.quant import QuantConfig
from rose.kernels.draw import generator, matrix, normal
from rose.kernels.weights import ExpertWeights, LinearWeights
from rose.layers.build import LayerBuild
from rose.layers.own_pages import OwnPages
from rose.models.gpt_oss.config import GptOssConfig
from rose.models.gpt_oss.model import GptOss
from rose.models.gpt_oss.parameters import GptOssParameters, LayerParameters
from rose.quant.scheme import QuantScheme, scheme
from rose.utils.device import DeviceFacts

_SUBLAYER_RMS = 0.7
"""Of what one sub-layer adds to the stream: after 72 of them 1 has grown to about 6."""
_BIAS = 0.02
"""Small: a bias is the same for all tokens, and what all tokens share makes them choose the same experts."""
_HEAD_GAIN = 3.0
"""Logits a few units wide: greedy decoding has clear winners, sampling many candidates."""


def synthetic_model(
    model_config: GptOssConfig, config: EngineConfig, device: DeviceFacts, *, seed: int
) -> GptOss:
    """Build a whole model for one device from a resolved configuration."""
    return GptOss(
        model_config,
        synthetic_parameters(model_config, config.quant, device=device.kind, seed=seed),
        build=LayerBuild(quant=config.quant, device=device, kernels=config.kernels),
        page_tokens=config.cache.page_tokens,
        num_positions=config.context_tokens,
    )


def synthetic_parameters(
    config: GptOssConfig, quant: QuantConfig, *, device: str, seed: int
) -> GptOssParameters:
    """Draw all parameters in the formats of a resolved `quant`."""
    source, formats = generator(device, seed), scheme(quant)
    activation = formats.activations.name
    return GptOssParameters(
        embedding_VD=normal(config.vocab_size, config.hidden_size, source=source, dtype=activation),
        layers=tuple(_layer(config, formats, source) for _ in range(config.num_layers)),
        final_norm_D=_norm(config, source),
        head=LinearWeights(
            matrix=matrix(
                formats.head.name,
                config.vocab_size,
                config.hidden_size,
                source=source,
                gain=_HEAD_GAIN,
            )
        ),
    )


def _norm(config: GptOssConfig, source: torch.Generator) -> Tensor:
    return 1 + normal(config.hidden_size, source=source, scale=0.1)


def _layer(config: GptOssConfig, formats: QuantScheme, source: torch.Generator) -> LayerParameters:
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
    width, kv_width = (n * config.head_dim for n in (config.num_q_heads, config.num_kv_heads))
    projection, activation = formats.projection.name, formats.activations.name

    def bias(*shape: int) -> Tensor:
        return normal(*shape, source=source, dtype=activation, scale=_BIAS)

    def linear(rows: int, columns: int, *, kind: str, gain: float = 1.0) -> LinearWeights:
        drawn = matrix(kind, rows, columns, source=source, gain=gain)
        return LinearWeights(matrix=drawn, bias_N=bias(rows))

    # A weighted sum of K experts, of SwiGLU outputs of about 0.8 each, has about 0.8 / sqrt(K).
    down_gain = _SUBLAYER_RMS * math.sqrt(config.experts_per_token) / 0.8
    return LayerParameters(
        attention_norm_D=_norm(config, source),
        qkv=linear(width + 2 * kv_width, hidden, kind=projection),
        sinks_H=normal(config.num_q_heads, source=source),
        out=linear(hidden, width, kind=projection, gain=2 * _SUBLAYER_RMS),
        expert_norm_D=_norm(config, source),
        router=linear(experts, hidden, kind=activation),
        experts=ExpertWeights(
            gate_up=matrix(formats.experts.name, experts, 2 * inner, hidden, source=source),
            gate_up_bias_EF=bias(experts, 2 * inner),
            down=matrix(
                formats.experts.name, experts, hidden, inner, source=source, gain=down_gain
            ),
            down_bias_ED=bias(experts, hidden),
        ),
    )


@torch.inference_mode()
def distinct_experts(model: GptOss, token_ids_ST: Tensor) -> list[int]:
    """Return how many different experts of each layer the last tokens of these prompts hit together.

    Shapes   token_ids_ST int64 [S, T]: one prompt per row. S rows of a few dozen tokens route as a decode step of
             S sequences does; one token per row would not, since all would see nothing but themselves.
    """
    num_sequences, num_tokens = token_ids_ST.shape
    chosen = _chosen_experts(model, token_ids_ST)
    return [ids_TK.view(num_sequences, num_tokens, -1)[:, -1].unique().numel() for ids_TK in chosen]


def _chosen_experts(model: GptOss, token_ids_ST: Tensor) -> list[Tensor]:
    """Return per layer the experts [S T, K] of every token."""
    num_sequences, num_tokens = token_ids_ST.shape
    pages = OwnPages(
        model.config,
        num_sequences=num_sequences,
        max_tokens=num_tokens,
        page_tokens=model.page_tokens,
        dtype=model.kv_dtype,
        device=token_ids_ST.device,
    )
    chosen: list[Tensor] = []
    for block in model.blocks:
        block.experts.observer = chosen.append
    try:
        step = pages.step(prefill=[(s, num_tokens) for s in range(num_sequences)])
        model.forward(token_ids_ST.flatten(), step)
    finally:
        for block in model.blocks:
            block.experts.observer = None
    return chosen


def mean_distinct_experts(model: GptOss, num_sequences: int, *, seed: int) -> float:
    """Return the mean over layers of `distinct_experts` for a decode step of random tokens."""
    device = model.device
    token_ids_ST = torch.randint(
        model.config.vocab_size,
        (num_sequences, 64),
        generator=generator(device, seed),
        device=device,
    )
    counts = distinct_experts(model, token_ids_ST)
    return sum(counts) / len(counts)
