"""Read a converted checkpoint again and compare it, number by number, with its source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from rose.kernels.formats import FORMATS, FP8_BLOCK, MXFP4, FormattedTensor, decode
from rose.quant.encode import is_lossless
from rose.quant.fp8 import EXACT_SPAN, exponent_spans
from rose.utils.math import ceil_div
from rose.weights.accounts import require_clean
from rose.weights.loader import Progress, ignore_progress
from rose.weights.pieces import split, stream
from rose.weights.reader import CheckpointReader
from rose.weights.rules import WeightRule

_STRIP_ROWS = 1024


@dataclass(slots=True, kw_only=True)
class TensorReport:
    """How a tensor of the copy compares with its source."""

    name: str
    source_format: str
    target_format: str
    is_exact: bool = True
    """Every number is the same."""
    span: int | None = None
    """Largest difference of MXFP4 block exponents within a 128x128 tile; None where the source is not MXFP4."""
    num_wide_tiles: int = 0
    """Tiles whose span is over 14."""
    largest_error: float = 0.0
    largest_magnitude: float = 0.0

    @property
    def is_as_promised(self) -> bool:
        """Whether it is exact, or rounded where the formats allow no better."""
        return self.is_exact or not self._must_be_exact

    @property
    def _must_be_exact(self) -> bool:
        if self.target_format == "fp8_block" and self.source_format == "mxfp4":
            return self.num_wide_tiles == 0
        return is_lossless(FORMATS[self.source_format], FORMATS[self.target_format])

    def add(self, source: FormattedTensor, copy: FormattedTensor) -> None:
        """Take one more piece into account."""
        if source.format is MXFP4 and copy.format is FP8_BLOCK:
            spans = exponent_spans(source)
            self.span = max(self.span or 0, int(spans.max()))
            self.num_wide_tiles += int((spans > EXACT_SPAN).sum())
        self.source_format = source.format.name
        for wanted, got in zip(_numbers(source), _numbers(copy), strict=True):
            self._compare(wanted, got)

    def _compare(self, wanted: Tensor, got: Tensor) -> None:
        if wanted.dtype != got.dtype:
            wanted, got = wanted.double(), got.double()
        error = float((wanted - got).abs().max())
        # A NaN error compares false with everything; it must not pass for exact.
        self.is_exact = self.is_exact and error == 0.0
        self.largest_error = max(self.largest_error, error) if error == error else float("nan")
        self.largest_magnitude = max(self.largest_magnitude, float(wanted.abs().max()))


def _numbers(matrix: FormattedTensor) -> Iterator[Tensor]:
    """Decode some rows at a time: float32 of a whole expert would leave every cache (measured: twice as slow)."""
    rows = matrix.format.block[0] if matrix.format.block else 1
    for start in range(0, matrix.values.shape[0], _STRIP_ROWS):
        stop = start + _STRIP_ROWS
        scales = matrix.scales
        yield decode(
            FormattedTensor(
                format=matrix.format,
                values=matrix.values[start:stop],
                scales=None if scales is None else scales[start // rows : ceil_div(stop, rows)],
            )
        )


def verify(
    source: CheckpointReader,
    source_rules: Iterable[WeightRule],
    copy: CheckpointReader,
    copy_rules: Iterable[WeightRule],
    *,
    device: str = "cpu",
    progress: Progress = ignore_progress,
) -> list[TensorReport]:
    """Compare every tensor; the reports come in the order of the copy's rules.

    Raises  CheckpointError listing what is missing, unused or misshapen in the copy.
    """
    copy_rules = list(copy_rules)
    require_clean(copy, copy_rules)
    by_place = {(rule.target, rule.part): rule for rule in source_rules}
    total, done = copy.num_bytes, 0
    reports = []
    for rule in copy_rules:
        origin = by_place[rule.target, rule.part]
        report = TensorReport(
            name=rule.values_name,
            source_format=origin.storage.format.name,
            target_format=rule.storage.format.name,
        )
        wanted = stream(source, split(origin))
        got = stream(copy, split(rule))
        for (_, original), (_, copied) in zip(wanted, got, strict=True):
            report.add(original.to(device), copied.to(device))
            done += copied.num_bytes
            progress(done, total, rule.values_name)
        reports.append(report)
    return reports
