"""Error of attention with KV in E4M3 and in bf16, with and without scales: what decided that `fp8_e4m3` has none.

Run it as
    PYTHONPATH=src python benchmarks/kv_formats.py [--json FILE]
and it prints JSON lines. Made-up attention has gpt-oss's heads, one query over its history in float64; keys and
values are
  plain     normal numbers, scores two wide
  channels  the same, four channels of each head 20 times larger, as biases make them
  tiny      a 1,024th of plain, scores as wide: most numbers are subnormal in E4M3
  huge      300 times plain, scores as wide: a seventh of the numbers is past 448
The embedded model runs as its reference in float32 over the fixed texts of `rose eval`; keys and values are rounded
where the reference attends, and logits are compared with those of nothing rounded.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rose.bench.record import Origin, append
from rose.bench.scheduler import cpu_name
from rose.cli.serve import EMBEDDED_MODEL
from rose.config.quant import QuantConfig
from rose.eval.logprobs import fixed_texts, mean_kl, of_next
from rose.frontend.tokenizer import load_tokenizer
from rose.kernels.formats import E4M3_MAX, to_e4m3
from rose.models.gpt_oss import reference
from rose.models.gpt_oss.original import reference_config, weights_of
from rose.models.gpt_oss.weights import checkpoint_format, load, read_config

HEADS, KV_HEADS, HEAD_DIM, PAGE = 64, 8, 64, 64
CONTEXTS = (1024, 8192)


def _scaled(x_TGD: Tensor, amax: Tensor) -> Tensor:
    scale = (amax / E4M3_MAX).clamp_min(1e-30)
    return to_e4m3(x_TGD / scale).to(x_TGD.dtype) * scale


def _per_page(x_TGD: Tensor) -> Tensor:
    pages = x_TGD.split(PAGE)
    return torch.cat([_scaled(p, p.abs().amax(dim=(0, 2), keepdim=True)) for p in pages])


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda x: x.bfloat16().to(x.dtype),
    "fp8_e4m3": lambda x: to_e4m3(x).to(x.dtype),
    "fp8_e4m3, a scale per page and head": _per_page,
    "fp8_e4m3, a scale per token and head": lambda x: _scaled(x, x.abs().amax(-1, keepdim=True)),
}


def _drawn(kind: str, tokens: int, source: torch.Generator) -> Tensor:
    x_TGD = torch.randn(tokens, KV_HEADS, HEAD_DIM, generator=source, dtype=torch.float64)
    if kind == "channels":
        x_TGD[..., :4] *= 20
    return x_TGD * {"tiny": 2.0**-10, "huge": 300.0}.get(kind, 1.0)


def made_up(context: int, kind: str, *, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the relative error of the output of one token by format."""
    source = torch.Generator().manual_seed(seed)
    k_TGD, v_TGD = (_drawn(kind, context, source) for _ in range(2))
    q_1HD = torch.randn(1, HEADS, HEAD_DIM, generator=source, dtype=torch.float64)
    # Scores of standard deviation 2 whatever the keys.
    q_1HD *= 2 / k_TGD.square().mean().sqrt()
    sinks_H = torch.randn(HEADS, generator=source, dtype=torch.float64)

    def attend(k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        k_GDT, v_GTD = k_TGD.permute(1, 2, 0), v_TGD.transpose(0, 1)
        scores_GRT = q_1HD.view(KV_HEADS, -1, HEAD_DIM) @ k_GDT / math.sqrt(HEAD_DIM)
        sink_GR1 = sinks_H.view(KV_HEADS, -1, 1)
        return torch.cat([scores_GRT, sink_GR1], dim=-1).softmax(-1)[..., :-1] @ v_GTD

    right = attend(k_TGD, v_TGD)
    for name, rounded in FORMATS.items():
        found = attend(rounded(k_TGD), rounded(v_TGD))
        error = float((found - right).norm() / right.norm())
        yield {"numbers": kind, "context": context, "kv": name, "relative_error": _short(error)}


def embedded() -> Iterator[dict[str, Any]]:
    """Yield by text and format what rounding does to each layer's attention and to the logits."""
    config = read_config(EMBEDDED_MODEL)
    quant = QuantConfig(
        weights=checkpoint_format(EMBEDDED_MODEL), activations="float32", kv="float32"
    )
    weights = weights_of(load(EMBEDDED_MODEL, config, quant), torch.float32)
    names, plain = reference_config(config), reference.attention
    for text, token_ids in fixed_texts(load_tokenizer(EMBEDDED_MODEL)).items():
        tokens_T = torch.tensor(token_ids)
        seen: list[tuple[float, float, float]] = []

        def watched(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            sinks: Tensor,
            *,
            window_tokens: int | None,
            seen: list[tuple[float, float, float]] = seen,
        ) -> Tensor:
            below = torch.cat([k.abs(), v.abs()]) < 2.0**-6
            seen.append((float(k.abs().max()), float(v.abs().max()), float(below.float().mean())))
            return plain(q, k, v, sinks, window_tokens=window_tokens)

        with mock.patch.object(reference, "attention", watched):
            right_TV = reference.forward(names, weights, tokens_T)
        keys, values, below = zip(*seen, strict=True)
        yield {
            "text": text,
            "tokens": len(token_ids),
            "largest_key": _short(max(keys)),
            "largest_value": _short(max(values)),
            "share_below_2^-6": _short(statistics.mean(below)),
        }
        for name, rounded in FORMATS.items():
            errors: list[float] = []

            def attention(
                q: Tensor,
                k: Tensor,
                v: Tensor,
                sinks: Tensor,
                *,
                window_tokens: int | None,
                rounded: Callable[[Tensor], Tensor] = rounded,
                errors: list[float] = errors,
            ) -> Tensor:
                exact = plain(q, k, v, sinks, window_tokens=window_tokens)
                found = plain(q, rounded(k), rounded(v), sinks, window_tokens=window_tokens)
                errors.append(float((found - exact).norm() / exact.norm()))
                return found

            with mock.patch.object(reference, "attention", attention):
                found_TV = reference.forward(names, weights, tokens_T)
            apart_T = (of_next(found_TV, token_ids) - of_next(right_TV, token_ids)).abs()
            moved = found_TV.argmax(-1) != right_TV.argmax(-1)
            yield {
                "text": text,
                "tokens": len(token_ids),
                "kv": name,
                "relative_error_of_attention": _short(statistics.mean(errors)),
                "worst_layer": _short(max(errors)),
                "relative_error_of_logits": _short(
                    float((found_TV - right_TV).norm() / right_TV.norm())
                ),
                "mean_kl_nats": _short(mean_kl(right_TV, found_TV)),
                "mean_log_probability_apart": _short(float(apart_T.mean())),
                "first_choices_moved": _short(float(moved.float().mean())),
            }


def _short(value: float) -> float:
    return float(f"{value:.3g}")


@torch.inference_mode()
def main() -> None:
    """Print the lines, and append them to a file where one was named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    command = "PYTHONPATH=src python benchmarks/kv_formats.py"
    origin = Origin.here(device=cpu_name(), config="reference", command=command)
    for kind in ("plain", "channels", "tiny", "huge"):
        for context in CONTEXTS:
            for fields in made_up(context, kind):
                _say(arguments.json, origin.stamp({"bench": "kv_error", **fields}))
    for fields in embedded():
        _say(
            arguments.json,
            origin.stamp({"bench": "kv_error", "model": "tiny-gpt-oss", **fields}),
        )


def _say(path: Path | None, line: dict[str, Any]) -> None:
    print(line)
    append(path, line)


if __name__ == "__main__":
    main()
