"""Projections of up to 512 rows in Triton: a pipelined product that reads the matrix once per row tile.

Where output tiles are too few to fill the machine, the columns are split and a second small kernel adds the
parts in order; no atomics, so results repeat exactly. Weights are bf16, float32 or fp8_block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels import dependent
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import LinearWeights
from rose.utils.math import ceil_div, next_power_of_two

MAX_TOKENS = 512
_REDUCE_BLOCK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Launch shape of one call."""

    tokens: int
    """Rows of x per program, 16 or more."""
    rows: int
    """Rows of the matrix per program."""
    columns: int = 128
    splits: int = 1
    is_swapped: bool = False
    """The matrix is the M operand (64 rows or more then use wgmma); otherwise the tokens are."""
    num_warps: int = 4
    num_stages: int = 4
    is_dependent: bool = False
    """Programmatic dependent launch."""


def choose(num_tokens: int, sizes: Sizes, *, element_bytes: int = 2) -> Launch:
    """Return the launch shape. Measured on an H200 in bf16; float32, for tests, only has to fit.

    Microseconds at 1, 8, 32, 128 tokens: N 5120 K 2880: 10.6, 10.7, 11.2, 18.7; N 2880 K 4096 in two parts:
    10.4, 10.7, 11.4, 14.0; N 201088 K 2880: 256, 266, 279, 329. Fewer rows per program lose everywhere.
    """
    tokens = min(128, max(16, next_power_of_two(num_tokens)))
    if element_bytes > 2:
        return Launch(tokens=tokens, rows=64, columns=32, is_swapped=True, num_stages=3)
    if sizes["N"] >= 16384 and tokens > 16:
        warps = 4 if tokens <= 32 else 8
        return Launch(
            tokens=tokens, rows=128, columns=64, is_swapped=True, num_warps=warps, num_stages=5
        )
    if sizes["N"] < 4096:
        return Launch(tokens=tokens, rows=64, is_swapped=True, splits=2)
    if tokens > 64:
        return Launch(
            tokens=tokens, rows=128, columns=64, is_swapped=True, num_warps=8, num_stages=5
        )
    return Launch(tokens=tokens, rows=64, is_swapped=True, num_stages=5)


@triton.jit
def _kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, part_ptr, num_tokens, x_stride,
    N: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, SWAPPED: tl.constexpr, IS_FP8: tl.constexpr,
    IS_FLOAT32: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile, token_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    token = token_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_K)
    is_row = row < N
    is_token = token < num_tokens
    first = split * STEPS // SPLITS
    last = (split + 1) * STEPS // SPLITS
    w_ptrs = w_ptr + row.to(tl.int64)[:, None] * K + column[None, :]
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * x_stride + column[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if SWAPPED:
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    else:
        acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for step in range(first, last):
        offset = step * BLOCK_K
        if K % BLOCK_K == 0:
            w = tl.load(
                w_ptrs + offset, mask=is_row[:, None], other=0.0, eviction_policy="evict_first"
            )
            x = tl.load(x_ptrs + offset, mask=is_token[:, None], other=0.0)
        else:
            is_column = (column + offset < K)[None, :]
            w = tl.load(
                w_ptrs + offset,
                mask=is_row[:, None] & is_column,
                other=0.0,
                eviction_policy="evict_first",
            )
            x = tl.load(x_ptrs + offset, mask=is_token[:, None] & is_column, other=0.0)
        if IS_FLOAT32:
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        elif IS_FP8:
            w = w.to(tl.bfloat16)
        if IS_FP8:
            # BLOCK_N and BLOCK_K divide 128, so one scale covers the whole tile.
            scales_per_row: tl.constexpr = (K + 127) // 128
            scale = tl.load(scale_ptr + tile * BLOCK_N // 128 * scales_per_row + offset // 128)
            if SWAPPED:
                acc += tl.dot(w, x.T, input_precision="ieee") * scale
            else:
                acc += tl.dot(x, w.T, input_precision="ieee") * scale
        elif SWAPPED:
            acc = tl.dot(w, x.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
    y = acc
    if SWAPPED:
        y = acc.T
    target = token.to(tl.int64)[:, None] * N + row[None, :]
    is_out = is_token[:, None] & is_row[None, :]
    if SPLITS > 1:
        part = split.to(tl.int64) * num_tokens * N
        tl.store(part_ptr + part + target, y, mask=is_out)
    else:
        if HAS_BIAS:
            y += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
        if HAS_RESIDUAL:
            y += tl.load(residual_ptr + target, mask=is_out, other=0.0).to(tl.float32)
        tl.store(out_ptr + target, y.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def _reduce_kernel(
    part_ptr, bias_ptr, residual_ptr, out_ptr, num_tokens,
    N: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    is_in = column < N
    y = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        y += tl.load(part_ptr + (split * num_tokens + token) * N + column, mask=is_in, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=is_in, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + token * N + column, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + column, y.to(out_ptr.dtype.element_ty), mask=is_in)


def gemm(
    x_TK: Tensor, *, weights: LinearWeights, residual_TN: Tensor | None, out_TN: Tensor
) -> None:
    """See the contract."""
    if x_TK.shape[0] == 0:
        return
    num_rows, num_columns = weights.matrix.values.shape
    sizes = {"N": num_rows, "K": num_columns}
    shape = choose(x_TK.shape[0], sizes, element_bytes=x_TK.element_size())
    shape = replace(shape, is_dependent=dependent.pays(x_TK))
    launch(shape, x_TK, weights=weights, residual_TN=residual_TN, out_TN=out_TN)


def launch(
    shape: Launch,
    x_TK: Tensor,
    *,
    weights: LinearWeights,
    residual_TN: Tensor | None,
    out_TN: Tensor,
) -> None:
    """Run with a given launch shape; `choose` has the ones in use."""
    matrix_NK, scales, bias_N = weights.matrix.values, weights.matrix.scales, weights.bias_N
    num_rows, num_columns = matrix_NK.shape
    num_tokens = x_TK.shape[0]
    common = dependent.options(shape.is_dependent)
    flags = {
        "HAS_BIAS": bias_N is not None,
        "HAS_RESIDUAL": residual_TN is not None,
        "PDL": shape.is_dependent,
    }
    bias = out_TN if bias_N is None else bias_N
    residual = out_TN if residual_TN is None else residual_TN
    part = out_TN
    if shape.splits > 1:
        part = x_TK.new_empty(shape.splits, num_tokens, num_rows, dtype=torch.float32)
    grid = (ceil_div(num_rows, shape.rows), ceil_div(num_tokens, shape.tokens), shape.splits)
    _kernel[grid](
        x_TK, matrix_NK, matrix_NK if scales is None else scales, bias, residual, out_TN, part,
        num_tokens, x_TK.stride(0),
        N=num_rows, K=num_columns, BLOCK_T=shape.tokens, BLOCK_N=shape.rows, BLOCK_K=shape.columns,
        SPLITS=shape.splits, SWAPPED=shape.is_swapped,
        IS_FP8=matrix_NK.dtype == torch.float8_e4m3fn, IS_FLOAT32=x_TK.dtype == torch.float32,
        num_warps=shape.num_warps, num_stages=shape.num_stages, **flags, **common,
    )  # fmt: skip
    if shape.splits > 1:
        _reduce_kernel[(ceil_div(num_rows, _REDUCE_BLOCK), num_tokens)](
            part, bias, residual, out_TN, num_tokens,
            N=num_rows, SPLITS=shape.splits, BLOCK=_REDUCE_BLOCK, **flags, **common,
        )  # fmt: skip


def _limits(sizes: Sizes) -> str | None:
    if sizes["K"] % 16:
        return f"K is {sizes['K']}, takes multiples of 16"
    return None


register(
    Implementation(
        operation="gemm",
        name="triton",
        function=gemm,
        band=Band.TUNED,
        device="cuda",
        min_capability=(8, 0),
        formats={
            "activation": frozenset({"bf16", "float32"}),
            "weight": frozenset({"bf16", "float32", "fp8_block"}),
        },
        phases=frozenset({"decode"}),
        rows=(1, MAX_TOKENS),
        limits=_limits,
        note="pipelined product; columns split where tiles are few",
    )
)
