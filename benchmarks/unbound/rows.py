"""Projections of up to eight tokens in CUDA C++: a matrix is asked for before the kernel before has ended.

rows_sm90.cu has the kernel.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rose.kernels.build import CudaLibrary
from rose.kernels.weights import LinearWeights

MAX_TOKENS = 8
COLUMNS = (2880, 4096)
"""Of the projections of gpt-oss: the loop over a row is laid out at compile time."""

LIBRARY = CudaLibrary(Path(__file__).with_name("rows_sm90.cu"))
TYPES = "pppppiiiiiiip"
_rows = LIBRARY.launcher("launch_rows", TYPES)


def launch(
    tiles: int,
    x_TK: Tensor,
    *,
    weights: LinearWeights,
    residual_TN: Tensor | None,
    out_TN: Tensor,
    is_dependent: bool = True,
) -> None:
    """Run with 8 * `tiles` rows of the matrix to a block; see the contract."""
    matrix_NK, bias_N = weights.matrix.values, weights.bias_N
    _rows(
        x_TK.data_ptr(), matrix_NK.data_ptr(), 0 if bias_N is None else bias_N.data_ptr(),
        0 if residual_TN is None else residual_TN.data_ptr(), out_TN.data_ptr(),
        x_TK.shape[0], *matrix_NK.shape, x_TK.stride(0), out_TN.dtype == torch.float32, tiles,
        is_dependent, torch._C._cuda_getCurrentRawStream(x_TK.device.index),
    )  # fmt: skip
