"""Grouped FP8 products in Triton: both expert matrices with their epilogues.

One program per tile of rows and run of columns. Partial sums of one scale group leave the tensor core's own
accumulator for float32 ones, which the bias seeds. Tails of K read as zeros through the tensor descriptors;
tails of N are masked. No operand is padded in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rose.kernels.moe_experts.rows import RowTable
from rose.kernels.moe_experts.triton_permute import to_e4m3
from rose.utils.math import ceil_div, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """Launch shape of one product."""

    block_m: int
    block_n: int
    num_stages: int
    num_warps: int
    group_m: int = 16
    """Row tiles that share a run of columns before the next run: bounds what L2 must hold."""


@triton.jit
def _locate(
    item, starts_ptr, tiles_ptr, expert_ptr,
    RUNS: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Order of work: expert by expert, GROUP_M row tiles inside one run of columns, then the next run."""
    expert = tl.load(expert_ptr + item // RUNS)
    first = tl.load(tiles_ptr + expert)
    num_m = tl.load(tiles_ptr + expert + 1) - first
    local = item - first * RUNS
    band = local // (GROUP_M * RUNS)
    band_m = tl.minimum(num_m - band * GROUP_M, GROUP_M)
    local -= band * GROUP_M * RUNS
    row = tl.load(starts_ptr + expert) + (band * GROUP_M + local % band_m) * BLOCK_M
    end = tl.load(starts_ptr + expert + 1)
    return expert, row, end, local // band_m


@triton.jit
def _product(
    a_desc, w_desc, a_scales_ptr, w_scales_ptr, bias_ptr, a_stride, expert, row, end, run,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return bias + A W^T of one tile in float32."""
    rows = row + tl.arange(0, BLOCK_M)
    columns = run * BLOCK_N + tl.arange(0, BLOCK_N)
    WEIGHT_BLOCKS: tl.constexpr = (K + 127) // 128
    bias = tl.load(bias_ptr + expert * N + columns, mask=columns < N, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) + bias[None, :]
    w_scales_ptr += expert.to(tl.int64) * ((N + 127) // 128) * WEIGHT_BLOCKS
    for k in range(0, K, GROUP):
        a = a_desc.load([row, k])
        w = w_desc.load([expert * N + run * BLOCK_N, k])
        a_scale = tl.load(a_scales_ptr + (k // GROUP) * a_stride + rows, mask=rows < end, other=0.0)
        part = tl.dot(a, w.T)
        if BLOCK_N <= 128:
            w_scale = tl.load(w_scales_ptr + (run * BLOCK_N // 128) * WEIGHT_BLOCKS + k // 128)
            total += part * (a_scale * w_scale)[:, None]
        else:
            w_scale = tl.load(
                w_scales_ptr + (columns // 128) * WEIGHT_BLOCKS + k // 128,
                mask=columns < N,
                other=0.0,
            )
            total += part * (a_scale[:, None] * w_scale[None, :])
    return total


@triton.jit
def _gate_up_kernel(
    a_desc, w_desc, a_scales_ptr, w_scales_ptr, bias_ptr, starts_ptr, tiles_ptr, expert_ptr,
    hidden_ptr, hidden_scales_ptr, num_experts, a_stride, hidden_stride, alpha, limit,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    RUNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    item = tl.program_id(0)
    if item >= tl.load(tiles_ptr + num_experts) * RUNS:
        return
    expert, row, end, run = _locate(item, starts_ptr, tiles_ptr, expert_ptr, RUNS, BLOCK_M, GROUP_M)
    total = _product(
        a_desc, w_desc, a_scales_ptr, w_scales_ptr, bias_ptr, a_stride, expert, row, end, run,
        N, K, GROUP, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    gate, up = tl.split(tl.reshape(total, [BLOCK_M, BLOCK_N // 2, 2]))
    gate = tl.minimum(gate, limit)
    up = tl.clamp(up, -limit, limit)
    hidden = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    channel = run * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    hidden = tl.where((channel < N // 2)[None, :], hidden, 0.0)
    scale = tl.maximum(tl.max(tl.abs(hidden), axis=1), 1e-4) / 448.0
    rows = row + tl.arange(0, BLOCK_M)
    tl.store(hidden_scales_ptr + run * hidden_stride + rows, scale, mask=rows < end)
    tl.store(
        hidden_ptr + rows.to(tl.int64)[:, None] * (N // 2) + channel[None, :],
        to_e4m3(hidden / scale[:, None], INTERPRETED),
        mask=(rows < end)[:, None] & (channel < N // 2)[None, :],
    )


@triton.jit
def _down_kernel(
    a_desc, w_desc, a_scales_ptr, w_scales_ptr, bias_ptr, starts_ptr, tiles_ptr, expert_ptr,
    y_ptr, num_experts, a_stride,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    RUNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    item = tl.program_id(0)
    if item >= tl.load(tiles_ptr + num_experts) * RUNS:
        return
    expert, row, end, run = _locate(item, starts_ptr, tiles_ptr, expert_ptr, RUNS, BLOCK_M, GROUP_M)
    total = _product(
        a_desc, w_desc, a_scales_ptr, w_scales_ptr, bias_ptr, a_stride, expert, row, end, run,
        N, K, GROUP, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    rows = row + tl.arange(0, BLOCK_M)
    columns = run * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(
        y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :],
        total.to(y_ptr.dtype.element_ty),
        mask=(rows < end)[:, None] & (columns < N)[None, :],
    )


def gate_up(
    x_RD: Tensor, x_scales_BR: Tensor, table: RowTable, *,
    values_EFD: Tensor, scales: Tensor, bias_EF: Tensor, alpha: float, limit: float,
    x_group: int, shape: TileShape, interpreted: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Multiply by the gate-up matrix, apply the SwiGLU and quantise; a run of N columns is one group.

    Shapes   R rows, F = 2 I, C = ceil(F / block_n) groups of block_n / 2 channels
    Returns  values e4m3 [R, I], scales float32 [C, R rounded up to 4]
    """
    num_experts, wide, hidden = values_EFD.shape
    num_rows = x_RD.shape[0]
    runs = ceil_div(wide, shape.block_n)
    out_RI = x_RD.new_empty(num_rows, wide // 2)
    out_scales = x_RD.new_empty(runs, round_up(num_rows, 4), dtype=torch.float32)
    _gate_up_kernel[(table.max_tiles * runs,)](
        TensorDescriptor.from_tensor(x_RD, [shape.block_m, x_group]),
        TensorDescriptor.from_tensor(values_EFD.flatten(0, 1), [shape.block_n, x_group]),
        x_scales_BR, scales, bias_EF, table.starts_E1, table.tiles_E1, table.expert_M,
        out_RI, out_scales, num_experts, x_scales_BR.stride(0), out_scales.stride(0), alpha, limit,
        N=wide, K=hidden, GROUP=x_group, BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n, GROUP_M=shape.group_m, INTERPRETED=interpreted,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    return out_RI, out_scales


def down(
    a_RI: Tensor, a_scales: Tensor, table: RowTable, *,
    values_EDI: Tensor, scales: Tensor, bias_ED: Tensor, a_group: int, shape: TileShape,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Multiply by the down matrix.

    Returns  y [R, D] of `dtype`, bias added, not yet weighted
    """
    num_experts, hidden, inner = values_EDI.shape
    runs = ceil_div(hidden, shape.block_n)
    y_RD = a_RI.new_empty(a_RI.shape[0], hidden, dtype=dtype)
    _down_kernel[(table.max_tiles * runs,)](
        TensorDescriptor.from_tensor(a_RI, [shape.block_m, a_group]),
        TensorDescriptor.from_tensor(values_EDI.flatten(0, 1), [shape.block_n, a_group]),
        a_scales, scales, bias_ED, table.starts_E1, table.tiles_E1, table.expert_M,
        y_RD, num_experts, a_scales.stride(0),
        N=hidden, K=inner, GROUP=a_group, BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n, GROUP_M=shape.group_m,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    return y_RD
