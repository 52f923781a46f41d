"""Fill targets from a checkpoint: apply rules, cut for this rank, bring into the resident format, on the device.

Knows rules and formats, no model: what the targets mean is up to the caller. Runs once, before the first request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from rose.kernels.formats import FLOAT32, MXFP4, FormattedTensor, TensorFormat
from rose.quant.encode import encode, requantize
from rose.utils.dtypes import torch_dtype
from rose.weights.accounts import require_clean
from rose.weights.pieces import Cut, Piece, naming, split, stream
from rose.weights.reader import CheckpointReader
from rose.weights.rules import WeightRule

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all, and the name of what is being done."""


def ignore_progress(_done: int, _total: int, _name: str) -> None:
    """Report nothing."""


def load_targets(
    reader: CheckpointReader,
    rules: Iterable[WeightRule],
    *,
    format_of: Callable[[str], TensorFormat],
    cut: Cut,
    device: str,
    progress: Progress = ignore_progress,
) -> dict[str, FormattedTensor]:
    """Return every target of this rank in its resident format; targets of other ranks are absent.

    Raises  CheckpointError listing all that is missing, unused or misshapen, before any data is read.
    """
    rules = list(rules)
    require_clean(reader, rules)
    targets = _by_target(rules)
    plan = [piece for parts in targets.values() for rule in parts for piece in split(rule, cut)]
    total, done = sum(piece.num_bytes for piece in plan), 0
    filling = {
        name: _Filling(parts, format_of(parts[0].role), cut.size, device)
        for name, parts in targets.items()
        if split(parts[0], cut)
    }
    for piece, matrix in stream(reader, plan, is_pinned=device.startswith("cuda")):
        with naming(piece.rule):
            filling[piece.rule.target].put(piece, matrix.to(device))
        done += piece.num_bytes
        progress(done, total, piece.rule.target)
    return {name: target.finish() for name, target in filling.items()}


def blank_targets(
    rules: Iterable[WeightRule], *, format_of: Callable[[str], TensorFormat], cut: Cut
) -> dict[str, FormattedTensor]:
    """Return the targets of `load_targets` without numbers or memory, on torch's meta device."""
    return {
        name: _Filling(parts, format_of(parts[0].role), cut.size, "meta").blank()
        for name, parts in _by_target(list(rules)).items()
        if split(parts[0], cut)
    }


def _by_target(rules: list[WeightRule]) -> dict[str, list[WeightRule]]:
    targets: dict[str, list[WeightRule]] = {}
    for rule in rules:
        targets.setdefault(rule.target, []).append(rule)
    for parts in targets.values():
        parts.sort(key=lambda rule: rule.part)
        assert [rule.part for rule in parts] == list(range(parts[0].num_parts)), parts[0].target
    return targets


class _Filling:
    """One target while its pieces arrive; memory on the device is taken at the first piece."""

    def __init__(self, parts: list[WeightRule], form: TensorFormat, size: int, device: str) -> None:
        shapes = [rule.local_shape(size) for rule in parts]
        self._first_rows = [sum(s[0] for s in shapes[:i]) for i in range(len(shapes))]
        self._shape = (sum(s[0] for s in shapes), *shapes[0][1:])
        self._form = form
        # A tile that would hold rows of two parts can only be encoded when both are there.
        self._is_staged = form.block is not None and any(
            row % form.block[0] for row in self._first_rows
        )
        self._device = device
        self._held: FormattedTensor | None = None

    def put(self, piece: Piece, matrix: FormattedTensor) -> None:
        """Write a piece at its place, in the resident format."""
        form = FLOAT32 if self._is_staged else self._form
        if self._held is None:
            self._held = empty(form, self._shape, self._device)
        held, new = self._held, requantize(matrix, form)
        if piece.rule.is_stack:
            held.values[piece.at].copy_(new.values)
            if held.scales is not None and new.scales is not None:
                held.scales[piece.at].copy_(new.scales)
            return
        row = self._first_rows[piece.rule.part] + piece.at
        held.values[row : row + new.values.shape[0]].copy_(new.values)
        if held.scales is not None and new.scales is not None and form.block is not None:
            scale_row = row // form.block[0]
            held.scales[scale_row : scale_row + new.scales.shape[0]].copy_(new.scales)

    def blank(self) -> FormattedTensor:
        """Return the target with nothing in it."""
        return empty(self._form, self._shape, self._device)

    def finish(self) -> FormattedTensor:
        """Return the target."""
        assert self._held is not None, "no piece arrived"
        return encode(self._held.values, self._form) if self._is_staged else self._held


def empty(form: TensorFormat, shape: tuple[int, ...], device: str) -> FormattedTensor:
    """Allocate a vector, a matrix or a stack of matrices in a format, unfilled."""
    if form.block is None:
        dtype = torch_dtype(form.element)
        return FormattedTensor(format=form, values=torch.empty(shape, dtype=dtype, device=device))
    scale_shape = (*shape[:-2], *form.scale_shape(*shape[-2:]))
    if form is MXFP4:
        shape, dtype, scale_dtype = (*shape[:-1], shape[-1] // 32, 16), torch.uint8, torch.uint8
    else:
        dtype, scale_dtype = torch_dtype(form.element), torch.float32
    return FormattedTensor(
        format=form,
        values=torch.empty(shape, dtype=dtype, device=device),
        scales=torch.empty(scale_shape, dtype=scale_dtype, device=device),
    )
