"""The reference deliberately broken, one mistake at a time: what a comparison must be able to see.

Each context manager changes `reference.py` inside its block and puts it back. They are the mistakes that an engine for
gpt-oss is most likely to make, and that leave fluent text behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rose.models.gpt_oss import reference

Attend = Callable[..., Tensor]


@contextmanager
def _replaced(name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    with mock.patch.object(reference, name, make(getattr(reference, name))):
        yield


def without_sinks() -> AbstractContextManager[None]:
    """Leave the sinks out of the softmax."""

    def make(attention: Attend) -> Attend:
        return lambda q, k, v, sinks, **kw: attention(q, k, v, torch.full_like(sinks, -1e30), **kw)

    return _replaced("attention", make)


def window_off_by_one() -> AbstractContextManager[None]:
    """Let window layers see one token too many."""

    def make(attention: Attend) -> Attend:
        def wrong(*tensors: Tensor, window_tokens: int | None) -> Tensor:
            wider = None if window_tokens is None else window_tokens + 1
            return attention(*tensors, window_tokens=wider)

        return wrong

    return _replaced("attention", make)


def truncated_yarn() -> AbstractContextManager[None]:
    """Round the bounds of YaRN's ramp to whole pairs, as `truncate: true` would."""

    def make(_: Any) -> Any:
        def frequencies(
            config: reference.ReferenceConfig, dtype: torch.dtype
        ) -> tuple[Tensor, float]:
            half, theta = config.head_dim / 2, config.rope_theta

            def bound(turns: float) -> float:
                span = config.rope_original_tokens / (turns * 2 * math.pi)
                return half * math.log(span) / math.log(theta)

            low = math.floor(bound(config.rope_beta_fast))
            high = math.ceil(bound(config.rope_beta_slow))
            pair = torch.arange(0, int(half), dtype=dtype)
            base = theta ** (pair / half)
            ramp = ((pair - low) / (high - low)).clamp(0, 1)
            frequency = ramp / (config.rope_factor * base) + (1 - ramp) / base
            return frequency, 0.1 * math.log(config.rope_factor) + 1.0

        return frequencies

    return _replaced("yarn_frequencies", make)


def routing_over_all() -> AbstractContextManager[None]:
    """Take the softmax over all experts and keep the chosen ones' weights, which then sum to less than one."""

    def make(_: Any) -> Any:
        def route(logits_TE: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
            weights_TE, experts_TE = torch.sort(
                logits_TE.softmax(-1), dim=-1, descending=True, stable=True
            )
            return experts_TE[:, :num_chosen], weights_TE[:, :num_chosen]

        return route

    return _replaced("route", make)


def routing_in_bf16() -> AbstractContextManager[None]:
    """Round the routing weights to bf16: no mistake, but what served bf16 models do and float32 ones do not."""

    def make(route: Any) -> Any:
        def rounded(logits_TE: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
            experts_TK, weights_TK = route(logits_TE, num_chosen)
            return experts_TK, weights_TK.bfloat16().to(weights_TK.dtype)

        return rounded

    return _replaced("route", make)


BROKEN: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "sinks ignored": without_sinks,
    "YaRN truncated": truncated_yarn,
    "window off by one": window_off_by_one,
    "routing over all experts": routing_over_all,
}
