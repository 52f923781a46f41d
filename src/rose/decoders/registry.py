"""Decoder names -> how to build them over a runner. Imports no torch, so that a command line can check names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from rose.config.engine import EngineConfig
from rose.utils.errors import ConfigError

if TYPE_CHECKING:
    from rose.decoders.base import Decoder
    from rose.runtime.runner import ModelRunner
    from rose.sampling.sampler import Sampler

DecoderBuilder: TypeAlias = "Callable[[EngineConfig, ModelRunner, Sampler, int], Decoder]"
"""(resolved configuration, runner, sampler, context tokens) -> decoder."""


def _plain(
    config: EngineConfig, runner: ModelRunner, sampler: Sampler, context_tokens: int
) -> Decoder:
    from rose.decoders.plain import PlainDecoder

    return PlainDecoder(
        runner,
        sampler,
        use_graphs=config.use_graphs,
        graph_max_lengths=(context_tokens,),
    )


DECODERS: dict[str, DecoderBuilder] = {"plain": _plain}


def find_decoder(name: str) -> DecoderBuilder:
    """Return the builder of the decoder called `name`.

    Raises  ConfigError with the known names.
    """
    if name not in DECODERS:
        raise ConfigError(
            f"decoder={name!r} is not known; allowed: {', '.join(DECODERS)}; change decoding.decoder"
        )
    return DECODERS[name]
