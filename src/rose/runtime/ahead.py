"""Which list of kernels a start compiles ahead (kernels/ahead.py), and when that begins: before weights are read."""

from __future__ import annotations

from dataclasses import fields
from functools import cache

import torch

from rose.config.engine import EngineConfig
from rose.config.model import ModelConfig
from rose.config.quant import QuantConfig
from rose.kernels.ahead import AheadKernels, Facts, find_list
from rose.sampling.sampler import Sampler
from rose.utils.device import DeviceFacts

_OF_NO_KERNEL = ("num_layers", "context_tokens")
"""Sizes of a model that compiled kernels do not depend on; the limit of contexts is the configuration's."""


def list_facts(model_config: ModelConfig, quant: QuantConfig) -> Facts:
    """Return what lists are told apart by: what nearly every kernel depends on. Options that some do, such as the
    limit of sequences, are left out: the list of the default serves, and a few kernels are not in it.

    Units   quant is resolved
    """
    values = {f.name: getattr(model_config, f.name) for f in fields(model_config)}
    sizes = {
        name: value
        for name, value in values.items()
        if isinstance(value, int | str) and name not in _OF_NO_KERNEL
    }
    formats = {
        "weights": quant.weights,
        "projections": quant.projection_format,
        "activations": quant.activations,
        "kv": quant.kv,
    }
    return sizes | formats


def begin_ahead(
    model_config: ModelConfig, config: EngineConfig, device: DeviceFacts
) -> AheadKernels:
    """Begin to compile what a start of this configuration launches, beside the sources of the model, which begin when
    it is planned; return at once. Once in a process: later calls return what the first one did.

    Units   config is resolved
    """
    if device.kind != "cuda" or not torch.cuda.is_available():
        return AheadKernels(())
    # Bound again later; binding begins to compile its source.
    Sampler.build(model_config.vocab_size, device, kernels=config.kernels)
    return _begun(frozenset(list_facts(model_config, config.quant).items()))


@cache
def _begun(facts: frozenset[tuple[str, str | int]]) -> AheadKernels:
    # Triton, too, keeps compiled kernels by process.
    ahead = AheadKernels(find_list(dict(facts)))
    ahead.begin()
    return ahead
