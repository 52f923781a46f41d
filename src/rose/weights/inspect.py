"""What a checkpoint holds and what its weights would need in memory, from headers alone: no data is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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


def _num_bytes(form: TensorFormat, shape: tuple[int, ...]) -> int:
    if form.block is None or len(shape) == 1:
        return form.num_bytes(1, math.prod(shape))
    rows, columns = shape[-2:]
    assert form is not MXFP4 or columns % 32 == 0, "MXFP4 columns come in blocks of 32"
    return math.prod(shape[:-2]) * form.num_bytes(rows, columns)
