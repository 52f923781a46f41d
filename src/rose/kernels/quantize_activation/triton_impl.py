"""Rows to E4M3 in Triton: one program per row and run of groups."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.utils.math import ceil_div, is_power_of_two


@triton.jit
def _kernel(
    x_ptr, values_ptr, scales_ptr, x_stride, scale_row_stride, scale_group_stride,
    D: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * RUN + tl.arange(0, RUN)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_in = column < D
    x = tl.load(x_ptr + row * x_stride + column, mask=is_in, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4) / 448.0
    value = tl.clamp(x / scale[:, None], -448.0, 448.0)
    tl.store(values_ptr + row * D + column, value.to(values_ptr.dtype.element_ty), mask=is_in)
    tl.store(
        scales_ptr + row * scale_row_stride + group * scale_group_stride,
        scale,
        mask=group < NUM_GROUPS,
    )


def quantize_activation(x_TD: Tensor, *, group: int, values_TD: Tensor, scales_TB: Tensor) -> None:
    """See the contract."""
    num_tokens, columns = x_TD.shape
    if num_tokens == 0:
        return
    num_groups = ceil_div(columns, group)
    run = 8
    _kernel[(num_tokens, ceil_div(num_groups, run))](
        x_TD, values_TD, scales_TB, x_TD.stride(0), scales_TB.stride(0), scales_TB.stride(1),
        D=columns, NUM_GROUPS=num_groups, GROUP=group, RUN=run, num_warps=4,
    )  # fmt: skip


def _limits(sizes: Sizes) -> str | None:
    return (
        None if is_power_of_two(sizes["group"]) else f"group {sizes['group']}; takes powers of two"
    )


register(
    Implementation(
        operation="quantize_activation",
        name="triton",
        function=quantize_activation,
        band=Band.TUNED,
        device="cuda",
        min_capability=(8, 9),
        limits=_limits,
        interpreted=frozenset(),  # its casts to E4M3 lose carries, whatever they come from
        note="eight groups per program",
    )
)
