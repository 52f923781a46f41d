"""A tensor of a checkpoint in pieces small enough to stream: one expert, or some rows.

A piece is read on a background thread, turned to [out, in], and handed over in its stored format; nothing larger than
a piece is ever held on the host. Rank cuts happen here, so that what belongs to other ranks is not read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rose.kernels.formats import FLOAT32, MXFP4, FormattedTensor, decode, plain
from rose.quant.mxfp4 import check_scales
from rose.utils.errors import CheckpointError
from rose.weights.reader import CheckpointReader
from rose.weights.rules import WeightRule

PIECE_BYTES = 64 << 20
"""Rows are read in about this much; large enough to hide system calls, small beside any memory."""
_AHEAD = 6
_THREADS = 3
_ROW_UNIT = 128
"""Pieces of rows begin at multiples of this, so that FP8 tiles never straddle two pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """This rank's place among those that share the weights."""

    rank: int = 0
    size: int = 1


WHOLE = Cut()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Experts or rows start..stop of a rule's part; `at` is where they go in this rank's share of the part."""

    rule: WeightRule
    start: int
    stop: int
    at: int
    cut: Cut

    @property
    def num_bytes(self) -> int:
        """Bytes read from the file, without scales."""
        shape = self.rule.storage.values_shape(self.rule.shape)
        bits = self.rule.storage.format
        per_row = bits.num_bytes(1, math.prod(self.rule.shape[1:])) if bits.block is None else 0
        return (self.stop - self.start) * (per_row or math.prod(shape[1:]))


def split(rule: WeightRule, cut: Cut = WHOLE) -> list[Piece]:
    """List the pieces of a rule that one rank holds, in order; none where another rank holds it alone."""
    if rule.is_first_rank_only and cut.rank != 0:
        return []
    if _is_decoded_whole(rule, cut):
        return [Piece(rule=rule, start=0, stop=rule.shape[0], at=0, cut=cut)]
    first, count = 0, rule.shape[0]
    if rule.split_axis == 0:
        count = rule.local_shape(cut.size)[0]
        first = cut.rank * count
    unit = 1 if rule.is_stack else _rows_per_piece(rule)
    return [
        Piece(rule=rule, start=first + at, stop=first + min(at + unit, count), at=at, cut=cut)
        for at in range(0, count, unit)
    ]


def read(reader: CheckpointReader, piece: Piece, *, is_pinned: bool = False) -> FormattedTensor:
    """Read a piece: an expert's matrix [N, K], rows of a matrix [rows, K], or part of a vector.

    Raises  CheckpointError where MXFP4 scales hold NaN, or plain numbers NaN or infinity.
    """
    rule, form = piece.rule, piece.rule.storage.format
    start, stop = piece.start + rule.first_row, piece.stop + rule.first_row
    values = reader.read(rule.values_name, start, stop, is_pinned=is_pinned)
    values = values[0] if rule.is_stack else values
    if form.block is None or rule.scales_name is None:
        if not torch.isfinite(values).all():
            raise CheckpointError(
                f"{rule.values_name}: weights hold NaN or infinity; allowed: finite numbers; "
                "the file is damaged, fetch it again"
            )
        values = values.transpose(-1, -2) if rule.storage.is_transposed else values
        return plain(_columns(values, piece))
    if not rule.is_stack:
        start, stop = start // form.block[0], -(-stop // form.block[0])
    scales = reader.read(rule.scales_name, start, stop, is_pinned=is_pinned)
    scales = scales[0] if rule.is_stack else scales
    if form is MXFP4:
        check_scales(scales, rule.scales_name)
    matrix = FormattedTensor(format=form, values=values, scales=scales)
    return _decoded_share(matrix, piece) if _is_decoded_whole(rule, piece.cut) else matrix


@contextmanager
def naming(rule: WeightRule) -> Iterator[None]:
    """Put the tensor's name before errors that its numbers cause."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError([f"{rule.values_name}: {line}" for line in error.problems]) from None


def stream(
    reader: CheckpointReader, pieces: Iterable[Piece], *, is_pinned: bool = False
) -> Iterator[tuple[Piece, FormattedTensor]]:
    """Yield pieces in order while the next few are read in the background."""
    waiting: deque[tuple[Piece, Future[FormattedTensor]]] = deque()
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rose-read")
    try:
        for piece in pieces:
            waiting.append((piece, pool.submit(read, reader, piece, is_pinned=is_pinned)))
            if len(waiting) > _AHEAD:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _rows_per_piece(rule: WeightRule) -> int:
    row_bytes = max(1, math.prod(rule.shape[1:]) * 4)
    return max(_ROW_UNIT, PIECE_BYTES // row_bytes // _ROW_UNIT * _ROW_UNIT)


def _is_decoded_whole(rule: WeightRule, cut: Cut) -> bool:
    """Whether a rank's cut may run through a tile: then the matrix is cut as numbers, not as tiles."""
    has_tiles = rule.storage.format.block is not None and not rule.is_stack
    return has_tiles and rule.split_axis is not None and cut.size > 1


def _decoded_share(matrix: FormattedTensor, piece: Piece) -> FormattedTensor:
    numbers = decode(matrix)
    axis = piece.rule.split_axis
    assert axis is not None
    length = piece.rule.local_shape(piece.cut.size)[axis]
    share = numbers.narrow(axis, piece.cut.rank * length, length)
    return FormattedTensor(format=FLOAT32, values=share.contiguous())


def _columns(values: Tensor, piece: Piece) -> Tensor:
    if piece.rule.split_axis != 1 or piece.rule.is_stack:
        return values
    length = piece.rule.local_shape(piece.cut.size)[1]
    return values.narrow(1, piece.cut.rank * length, length)
