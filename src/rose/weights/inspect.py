"""What a checkpoint holds and what it would need in memory, from headers alone: no data is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rose.config.model import ModelConfig
from rose.kernels.formats import MXFP4, TensorFormat
from rose.weights.accounts import Account, account
from rose.weights.pieces import Cut, split
from rose.weights.reader import CheckpointReader
from rose.weights.rules import WeightRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A checkpoint in numbers."""

    num_files: int
    num_tensors: int
    num_parameters: int
    num_bytes: int
    bytes_by_dtype: dict[str, int]
    account: Account


@dataclass(frozen=True, slots=True, kw_only=True)
class KvNeed:
    """KV bytes on one rank."""

    per_token: int
    """In full-attention layers, for every token of every sequence."""
    per_sequence: int
    """In sliding layers, once the window is full."""


def contents(reader: CheckpointReader, rules: Iterable[WeightRule]) -> Contents:
    """Count what is there and compare it with what should be."""
    rules = list(rules)
    by_dtype: dict[str, int] = {}
    for entry in reader.entries.values():
        by_dtype[entry.dtype] = by_dtype.get(entry.dtype, 0) + entry.num_bytes
    return Contents(
        num_files=len(reader.files),
        num_tensors=len(reader.entries),
        num_parameters=sum(math.prod(rule.shape) for rule in rules),
        num_bytes=reader.num_bytes,
        bytes_by_dtype=dict(sorted(by_dtype.items())),
        account=account(reader, rules),
    )


def resident_bytes(
    rules: Iterable[WeightRule], format_of: Callable[[str], TensorFormat], *, cut: Cut
) -> int:
    """Return the bytes of one rank's weights, scales included, before any kernel's own layout."""
    total = 0
    for rule in rules:
        if split(rule, cut):
            total += _num_bytes(format_of(rule.role), rule.local_shape(cut.size))
    return total


def kv_need(config: ModelConfig, *, size: int, bytes_per_element: int, page_tokens: int) -> KvNeed:
    """Return KV bytes of one rank; sliding layers hold the window and one page that is being filled."""
    per_layer = 2 * config.num_kv_heads // size * config.head_dim * bytes_per_element
    full = sum(1 for window in config.window_tokens if window is None)
    windows = [window for window in config.window_tokens if window is not None]
    return KvNeed(
        per_token=full * per_layer,
        per_sequence=sum((window + page_tokens) * per_layer for window in windows),
    )


def _num_bytes(form: TensorFormat, shape: tuple[int, ...]) -> int:
    if form.block is None or len(shape) == 1:
        return form.num_bytes(1, math.prod(shape))
    rows, columns = shape[-2:]
    assert form is not MXFP4 or columns % 32 == 0, "MXFP4 columns come in blocks of 32"
    return math.prod(shape[:-2]) * form.num_bytes(rows, columns)
