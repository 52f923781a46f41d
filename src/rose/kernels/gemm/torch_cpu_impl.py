"""The torch projection for small models on a CPU: the matrix is widened once at load, not in every call."""

from __future__ import annotations

import torch

from rose.kernels.formats import FormattedTensor, plain
from rose.kernels.gemm.torch_impl import gemm
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import LinearWeights

MOST_ELEMENTS = 1 << 26
"""Widened, 256 MiB: the head of a model with hidden size 320. Larger models would not fit a CPU twice."""


def _widened(matrix: FormattedTensor) -> FormattedTensor:
    """Return the matrix in float32, in which every format is exact (float64 stays)."""
    return matrix if matrix.values.dtype == torch.float64 else plain(matrix.to_float())


def _prepare(weights: LinearWeights) -> LinearWeights:
    return LinearWeights(matrix=_widened(weights.matrix), bias_N=weights.bias_N)


def _limits(sizes: Sizes) -> str | None:
    elements = sizes["N"] * sizes["K"]
    return None if elements <= MOST_ELEMENTS else f"{elements} elements, takes {MOST_ELEMENTS}"


register(
    Implementation(
        operation="gemm",
        name="torch_cpu",
        function=gemm,
        band=Band.TUNED,
        device="cpu",
        limits=_limits,
        prepare=_prepare,
        note="float32 copy of the matrix, made at load",
    )
)
