"""The model, with the kernels that serve, against the float32 reference at real shapes and few layers.

Four runs of the same weights and tokens: the reference in float32, the reference in bf16 with float32 norms and angles,
the reference in float32 with KV and the experts' inputs rounded as the cache and the bound prefill kernel round them,
and our model.
Compared are the logits of every position after one prefill, and those of the last tokens decoded one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rose.bench.build import setup
from rose.bench.record import Origin, append
from rose.kernels.formats import to_e4m3
from rose.kernels.moe_experts.reference import rounded_swiglu
from rose.kernels.quantize_activation.reference import rounded
from rose.kernels.registry import REGIMES, implementations
from rose.layers.build import LayerBuild
from rose.layers.own_pages import OwnPages
from rose.models.gpt_oss import reference
from rose.models.gpt_oss.model import GptOss
from rose.models.gpt_oss.original import reference_config, weights_of
from rose.models.gpt_oss.parameters import GptOssParameters
from rose.models.gpt_oss.synthetic import synthetic_parameters
from rose.utils.errors import ConfigError


@contextmanager
def usual_bf16() -> Iterator[None]:
    """Make the reference keep norms and rotary angles in float32, as published bf16 models do, inside the block."""
    norm, angles = reference.rms_norm, reference.rotary_angles

    def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return norm(x_TD.float(), weight_D.float(), eps).to(x_TD.dtype)

    def rotary_angles(
        config: reference.ReferenceConfig, num_positions: int, dtype: torch.dtype
    ) -> Tensor:
        return angles(config, num_positions, torch.float32).to(dtype)

    reference.rms_norm, reference.rotary_angles = rms_norm, rotary_angles
    try:
        yield
    finally:
        reference.rms_norm, reference.rotary_angles = norm, angles


@contextmanager
def rounded_experts(formats: tuple[str, str]) -> Iterator[None]:
    """Make the reference round what enters each of the experts' two products, inside the block."""
    plain = reference.expert_block

    def expert_block(
        x_TD: Tensor, w: dict[str, Tensor], config: reference.ReferenceConfig
    ) -> tuple[Tensor, Tensor]:
        h_TD = reference.rms_norm(x_TD, w["mlp.norm.scale"], config.rms_norm_eps)
        logits_TE = h_TD @ w["mlp.gate.weight"].T + w["mlp.gate.bias"]
        experts_TK, weights_TK = reference.route(logits_TE, config.experts_per_token)
        out_TD, inner_TD = torch.zeros_like(h_TD), rounded(h_TD.float(), formats[0])
        for e in range(logits_TE.shape[1]):
            token, k = torch.where(experts_TK == e)
            u = inner_TD[token] @ w["mlp.mlp1_weight"][e].T + w["mlp.mlp1_bias"][e]
            a = reference.swiglu(u, config.swiglu_alpha, config.swiglu_limit)
            a = rounded_swiglu(a, formats[1], limit=config.swiglu_limit)
            y = a @ w["mlp.mlp2_weight"][e].T + w["mlp.mlp2_bias"][e]
            out_TD.index_add_(0, token, weights_TK[token, k, None] * y)
        return out_TD, experts_TK

    reference.expert_block = expert_block
    try:
        yield
    finally:
        reference.expert_block = plain


@contextmanager
def rounded_kv() -> Iterator[None]:
    """Make the reference round keys and values to E4M3, as a KV cache in fp8_e4m3 does, inside the block."""
    plain = reference.attention

    def attention(
        q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sinks_H: Tensor, *, window_tokens: int | None
    ) -> Tensor:
        k_TGd, v_TGd = (to_e4m3(x).to(x.dtype) for x in (k_TGd, v_TGd))
        return plain(q_THd, k_TGd, v_TGd, sinks_H, window_tokens=window_tokens)

    reference.attention = attention
    try:
        yield
    finally:
        reference.attention = plain


@torch.inference_mode()
def our_logits(model: GptOss, token_ids_T: Tensor, *, num_decoded: int) -> tuple[Tensor, Tensor]:
    """Return float32 logits [T, V] of one prefill, and [num_decoded, V] of the last tokens decoded singly."""
    device = token_ids_T.device
    num_tokens = len(token_ids_T)

    def pages() -> OwnPages:
        return OwnPages(
            model.config,
            num_sequences=1,
            max_tokens=num_tokens,
            page_tokens=model.page_tokens,
            dtype=model.kv_dtype,
            device=device,
        )

    hidden_TD = model.forward(token_ids_T, pages().step(prefill=[(0, num_tokens)]))
    prefilled = torch.cat([model.logits(part_TD) for part_TD in hidden_TD.split(256)])
    own, first = pages(), num_tokens - num_decoded
    model.forward(token_ids_T[:first], own.step(prefill=[(0, first)]))
    decoded = [
        model.logits(model.forward(token_ids_T[i : i + 1], own.step(decode=[0])))
        for i in range(first, num_tokens)
    ]
    return prefilled, torch.cat(decoded)


def relative(found_TV: Tensor, wanted_TV: Tensor) -> float:
    """Return ||found - wanted|| / ||wanted||, summed in float64 row by row."""
    rows = zip(found_TV.split(256), wanted_TV.split(256), strict=True)
    squares = [
        ((a.float() - b).double().square().sum(), b.double().square().sum()) for a, b in rows
    ]
    over, under = (torch.stack(parts).sum() for parts in zip(*squares, strict=True))
    return float((over / under).sqrt())


@torch.inference_mode()
def measure(
    model: GptOss,
    parameters: GptOssParameters,
    *,
    num_tokens: int,
    num_decoded: int,
    rounding: tuple[str, str] | None,
    seed: int,
) -> dict[str, float]:
    """Return relative errors of the logits by name; `rounding`: formats of the prefill experts' inputs."""
    device = parameters.embedding_VD.device
    config = model.config
    source = torch.Generator(device).manual_seed(seed)
    token_ids_T = torch.randint(config.vocab_size, (num_tokens,), generator=source, device=device)
    names = reference_config(config)
    is_kv_rounded = model.kv_dtype == torch.float8_e4m3fn
    is_tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference is float32 in earnest
    try:
        with torch.device(device):
            exact = weights_of(parameters, torch.float32)
            wanted_TV = reference.forward(names, exact, token_ids_T)
            errors = {}
            rounded_TV = kv_TV = None
            if is_kv_rounded:
                with rounded_kv():
                    rounded_TV = kv_TV = reference.forward(names, exact, token_ids_T)
                errors["reference_kv_rounded"] = relative(kv_TV, wanted_TV)
            if rounding is not None:
                with rounded_experts(rounding), rounded_kv() if is_kv_rounded else nullcontext():
                    rounded_TV = reference.forward(names, exact, token_ids_T)
                errors["reference_rounded"] = relative(rounded_TV, wanted_TV)
            del exact
            in_bf16 = weights_of(parameters, torch.bfloat16)
            with usual_bf16():
                bf16_TV = reference.forward(names, in_bf16, token_ids_T)
            errors["pytorch_bf16"] = relative(bf16_TV, wanted_TV)
            errors["pytorch_bf16_last_tokens"] = relative(
                bf16_TV[-num_decoded:], wanted_TV[-num_decoded:]
            )
            del bf16_TV
            if kv_TV is not None:
                # bf16 moves numbers across the middle between two of E4M3: PyTorch in bf16 pays for that as we do.
                with usual_bf16(), rounded_kv():
                    bf16_TV = reference.forward(names, in_bf16, token_ids_T)
                errors["pytorch_bf16_kv_rounded"] = relative(bf16_TV, kv_TV)
                errors["pytorch_bf16_kv_rounded_last_tokens"] = relative(
                    bf16_TV[-num_decoded:], kv_TV[-num_decoded:]
                )
                del bf16_TV
            del in_bf16
    finally:
        torch.backends.cuda.matmul.allow_tf32 = is_tf32
    prefilled_TV, decoded_TV = our_logits(model, token_ids_T, num_decoded=num_decoded)
    errors["prefill"] = relative(prefilled_TV, wanted_TV)
    if rounded_TV is not None:
        errors["prefill_against_rounded"] = relative(prefilled_TV, rounded_TV)
    errors["decode_after_prefill"] = relative(decoded_TV, wanted_TV[-num_decoded:])
    if kv_TV is not None:
        errors["decode_against_rounded"] = relative(decoded_TV, kv_TV[-num_decoded:])
    return errors


def prefill_kernels(model: GptOss, num_tokens: int) -> dict[str, str]:
    """Return operation -> implementation that a prefill of so many tokens at once runs."""
    regime = next(r for r in REGIMES if r.holds("prefill", num_tokens))
    return {
        row.operation: row.implementation for row in model.kernel_table() if row.regime == regime
    }


def prefill_rounding(model: GptOss, num_tokens: int) -> tuple[str, str] | None:
    """Return the formats to which the experts of such a prefill round their inputs; None where they round nothing."""
    name = prefill_kernels(model, num_tokens)["moe_experts"]
    found = {i.name: i for i in implementations("moe_experts")}[name].activation_rounding
    return (found[0], found[1]) if found else None


def run_accuracy(
    *, tokens: int, decoded: int, seed: int, path: Path | None, commit: str | None, **options: Any
) -> dict[str, Any]:
    """Measure at the first layers of a size, append the line, return it.

    Raises  ConfigError where nothing would be left to prefill
    """
    if decoded >= tokens:
        raise ConfigError(
            f"{decoded} of {tokens} tokens are to be decoded one by one, after a prefill of the others; "
            f"allowed: {tokens - 1} or fewer; lower --decoded or raise --tokens"
        )
    bench = setup(**options)
    parameters = synthetic_parameters(
        bench.model_config, bench.config.quant, device=bench.device.kind, seed=bench.seed
    )
    model = GptOss(
        bench.model_config,
        parameters,
        build=LayerBuild(
            quant=bench.config.quant, device=bench.device, kernels=bench.config.kernels
        ),
        page_tokens=bench.config.cache.page_tokens,
        num_positions=tokens,
    )
    errors = measure(
        model,
        parameters,
        num_tokens=tokens,
        num_decoded=decoded,
        rounding=prefill_rounding(model, tokens),
        seed=seed,
    )
    table = model.kernel_table()
    origin = Origin.here(device=bench.device.name, config=bench.name, commit=commit)
    line = origin.stamp(
        {
            "bench": "accuracy",
            "model": bench.size,
            "layers": bench.model_config.num_layers,
            "tokens": tokens,
            "decoded": decoded,
            "relative_error_of_logits": {k: float(f"{v:.4g}") for k, v in errors.items()},
            "prefill_kernels": prefill_kernels(model, tokens),
            "decode_kernels": {
                row.operation: row.told for row in table if row.regime.holds("decode", 1)
            },
        }
    )
    append(path, line)
    return line
