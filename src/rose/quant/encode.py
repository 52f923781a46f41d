"""From numbers, or from one format, to another: the one place that knows every encoder."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.formats import FP8_BLOCK, MXFP4, FormattedTensor, TensorFormat, decode
from rose.quant import bf16, fp8, mxfp4


def encode(w: Tensor, form: TensorFormat) -> FormattedTensor:
    """Encode numbers [..., N, K] in a weight format."""
    if form is FP8_BLOCK:
        return fp8.encode(w)
    if form is MXFP4:
        return mxfp4.encode(w)
    return bf16.encode(w, form)


def requantize(matrix: FormattedTensor, form: TensorFormat) -> FormattedTensor:
    """Return the matrix in another format; itself where it has that format already."""
    if matrix.format is form:
        return matrix
    if matrix.format is MXFP4 and form is FP8_BLOCK:
        return fp8.from_mxfp4(matrix)
    if matrix.format.block is None:
        return encode(matrix.values, form)  # float64 goes on undiminished
    return encode(decode(matrix), form)


def is_lossless(source: TensorFormat, target: TensorFormat) -> bool:
    """Tell whether every matrix survives; MXFP4 to FP8 depends on the exponents and is not listed."""
    if source is target:
        return True
    order = ("mxfp4", "fp8_block", "bf16", "float32", "float64")
    wider = {"mxfp4": 2, "fp8_block": 2, "bf16": 3, "float32": 4}
    return order.index(target.name) >= wider.get(source.name, len(order))
