"""Write a synthetic checkpoint: real names and shapes, numbers made from a seed, streamed to disk.

Each tensor's numbers depend on the seed, its name and its row or expert only, so that a subset of layers holds the
same numbers as the whole. Scaled so that activations stay near one and tokens spread over the experts.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rose.kernels.formats import MXFP4
from rose.weights.folders import require_empty, require_space
from rose.weights.loader import Progress, ignore_progress
from rose.weights.pieces import Piece, split
from rose.weights.rules import WeightRule
from rose.weights.writer import Shard, ShardWriter, TensorSpec, write_index

SHARD_BYTES = 4_800_000_000
"""Gives the published numbers of files: 3 for the 20b, 15 for the 120b."""
_RMS_OF_RANDOM_CODES = math.sqrt((0 + 0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)
# Residual contributions of 0.3 keep the stream near 2.5 after 36 layers: sqrt(1 + 36 x 2 x 0.3^2 x ~0.8). A head
# gain of 3 makes logits peaked enough that greedy choices are not decided by rounding.
_GAINS = {"out": 0.3, "down": 0.3, "head": 3.0}
_BIAS_RMS = 0.02


def synthesise(
    folder: Path,
    rules: Iterable[WeightRule],
    *,
    seed: int,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = ignore_progress,
) -> list[Shard]:
    """Write the tensors that `rules` would read, and their index.

    Raises  CheckpointError where the folder is not empty or the disk too small.
    """
    ordered = in_published_order(rules)
    shards = published_shards(ordered, shard_bytes)
    require_empty(folder, because="a synthetic checkpoint")
    total, done = sum(shard.num_bytes for shard in shards), 0
    require_space(folder, total)
    by_name = {name: rule for rule in ordered for name, _, _ in rule.tensors()}
    for shard in shards:
        with ShardWriter(folder, shard) as writer:
            for spec in shard.tensors:
                rule = by_name[spec.name]
                for piece in split(rule):
                    part = make(piece, spec.name, seed)
                    writer.append(spec.name, part)
                    done += part.numel() * part.element_size()
                    progress(done, total, spec.name)
            writer.finish()
    write_index(folder, shards)
    return shards


def in_published_order(rules: Iterable[WeightRule]) -> list[WeightRule]:
    """Sort as the published files are: layers by the string of their number, the rest in the last file."""

    def key(rule: WeightRule) -> tuple[int, str]:
        match = re.search(r"\.(\d+)\.", rule.source)
        return (0, match[1]) if match else (1, "")

    return sorted(rules, key=key)


def published_shards(rules: list[WeightRule], shard_bytes: int) -> list[Shard]:
    """Fill files in order, tensor by tensor, and number them as published: from 0, of one less than there are."""
    groups: list[list[TensorSpec]] = [[]]
    held = 0
    for rule in rules:
        for name, shape, dtypes in rule.tensors():
            spec = TensorSpec(name=name, dtype=dtypes[0], shape=shape)
            if groups[-1] and held + spec.num_bytes > shard_bytes:
                groups.append([])
                held = 0
            groups[-1].append(spec)
            held += spec.num_bytes
    last = len(groups) - 1
    return [
        Shard(file_name=f"model-{i:05d}-of-{last:05d}.safetensors", tensors=tuple(group))
        for i, group in enumerate(groups)
    ]


def make(piece: Piece, name: str, seed: int) -> Tensor:
    """Make the numbers of a piece of one tensor; the same for the same seed, name and place."""
    rule = piece.rule
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode()), piece.start]))
    shape = rule.shape[1:] if rule.is_stack else (piece.stop - piece.start, *rule.shape[1:])
    if rule.storage.format is MXFP4:
        rows, blocks = shape[0], shape[1] // 32
        if name == rule.values_name:
            return torch.from_numpy(rng.integers(0, 256, (rows, blocks, 16), dtype=np.uint8))
        # Three neighbouring powers: tiles convert to FP8 exactly.
        middle = 127 + round(math.log2(_rms(rule) / _RMS_OF_RANDOM_CODES))
        return torch.from_numpy(
            rng.integers(middle - 1, middle + 2, (rows, blocks), dtype=np.uint8)
        )
    assert rule.storage.format.block is None, "synthetic checkpoints are MXFP4 or plain"
    noise = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
    values = _scaled(noise, rule).bfloat16()
    return values.transpose(-1, -2) if rule.storage.is_transposed else values


def _scaled(noise: Tensor, rule: WeightRule) -> Tensor:
    if rule.role == "norm":
        return 1 + 0.05 * noise
    if rule.role == "bias":
        return _BIAS_RMS * noise
    if rule.role in ("sinks", "embedding"):
        return noise
    return _rms(rule) * noise


def _rms(rule: WeightRule) -> float:
    """Return gain / sqrt(inputs): inputs of size one give outputs of the gain's size."""
    kind = next((k for k in _GAINS if k in rule.target.split(".")), "")
    return _GAINS.get(kind, 1.0) / math.sqrt(rule.shape[-1])
