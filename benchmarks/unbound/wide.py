"""The experts of prefill_wide.cuh in ways that are not bound: both products in tiles of 256 tokens, a fixed scale for
the SwiGLU. `wide_groups` is what is bound (cuda_wide).

Weights, sort, combine and the order of columns are those of the bound experts (cuda_fused, cuda_swapped).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rose.kernels.build import CudaLibrary
from rose.kernels.moe_experts import cuda_wide
from rose.kernels.moe_experts.cuda_fused import current_stream
from rose.kernels.moe_experts.cuda_swapped import weight_operands
from rose.kernels.moe_experts.rows import RowTable
from rose.kernels.moe_experts.swapped_tables import OffsetExperts, OffsetMatrix

SOURCE = Path(__file__).with_name("wide_sm90.cu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How both products run."""

    promote: bool = False
    """Sums leave the tensor core every 256 columns; tiles are half as long then."""
    groups: bool = False
    """As bound: the SwiGLU leaves as bf16, is rounded in groups of 128 columns and multiplied by cuda_swapped."""
    late_ns: int = 0
    """By how much the second consumer begins later."""
    ahead: int = 0
    """By how many stages codes are asked into the L2 cache before they are copied."""

    @property
    def rows(self) -> int:
        """Tokens of a tile at most."""
        return 128 if self.promote else 256


SHAPES = {
    "wide": Shape(),
    "wide_late_500": Shape(late_ns=500),
    "wide_late_1000": Shape(late_ns=1000),
    "wide_ahead": Shape(ahead=8),
    "wide_promote": Shape(promote=True),
    "wide_groups": Shape(groups=True),
}


def hidden_scale(limit: float) -> float:
    """What a unit of the SwiGLU's E4M3 numbers is: they reach 448 where it reaches limit (limit + 1)."""
    return limit * (limit + 1) / 448


BEFORE_ROUNDING = 1.2e-2 - 2**-9
"""Of the largest number: how far off a SwiGLU may be before it is rounded. As much is left of what `wide_groups`, with
the same sums, is allowed (1.2e-2, and right by it on an H200) beside its rounding to bf16, which has 8 bits."""


def largest_error(wanted_RI: Tensor, limit: float) -> float:
    """Return how far a single number of `gate_up`'s SwiGLU may be from the exact one, over the largest of them.

    E4M3 numbers from 2^e on are 2^(e - 3) apart, and the nearest is off by half of it at most. With the largest number
    at m units, 2^e <= m < 2^(e + 1), half a step there is 2^(e - 4) / m of it: 1/32 where m lies right below a power of
    two, 1/16 right above one; smaller numbers have no larger steps. What is off before it is rounded may end up on the
    neighbour, a step away, but no further from the exact number than half a step and that. Numbers whose scale puts the
    largest at 448 = 1.75 * 2^8, as x has them, are never off by more than 1/28; in fixed units m may be anything.
    """
    units = max(wanted_RI.abs().max().item() / hidden_scale(limit), 2.0**-6)
    return 2.0 ** (math.floor(math.log2(units)) - 4) / units + BEFORE_ROUNDING


class WideLibrary:
    """The launchers of wide_sm90.cu on torch tensors; the rest is `bound`'s and the fused library's."""

    def __init__(self, library: CudaLibrary | None = None, *, defines: Sequence[str] = ()) -> None:
        self.library = library or CudaLibrary(SOURCE, defines=defines)
        self.bound = cuda_wide.WideLibrary(defines=defines)
        self.fused = self.bound.fused
        launcher = self.library.launcher
        self._gate_up = launcher("launch_wide_ways_gate_up", "ppfippppipppiiiiiiipfffp")
        self._down = launcher("launch_wide_ways_down", "ppfippppipppiiiiiiipp")

    def build(self) -> None:
        """Compile all sources unless they are compiled."""
        with ThreadPoolExecutor(2) as pool:
            builds = [pool.submit(self.library.build), pool.submit(self.bound.build)]
        for build in builds:
            build.result()

    def gate_up(
        self, x_RD: Tensor, scales_R: Tensor, table: RowTable, *,
        matrix: OffsetMatrix, bias_EF: Tensor, alpha: float, limit: float, shape: Shape,
    ) -> Tensor:  # fmt: skip
        """Multiply and apply the SwiGLU.

        Returns  e4m3 [R, I] in units of `hidden_scale(limit)`, as `down` reads it; bf16 in order with `groups`
        """
        if shape.groups:
            return self.bound.gate_up(
                x_RD, scales_R, table, matrix=matrix, bias_EF=bias_EF, alpha=alpha, limit=limit
            )
        hidden_RI = x_RD.new_empty(x_RD.shape[0], matrix.shape[1] // 2)
        self._gate_up(
            *operands(x_RD, scales_R, 0.0, table, matrix, bias_EF, shape),
            hidden_RI.data_ptr(), hidden_scale(limit), alpha, limit, current_stream(),
        )  # fmt: skip
        return hidden_RI

    def down(
        self, hidden_RI: Tensor, table: RowTable, *,
        matrix: OffsetMatrix, bias_ED: Tensor, limit: float, shape: Shape,
    ) -> Tensor:  # fmt: skip
        """Multiply and add the bias. Returns bf16 [R, D], not yet weighted."""
        y_RD = hidden_RI.new_empty(hidden_RI.shape[0], matrix.shape[1], dtype=torch.bfloat16)
        self._down(
            *operands(hidden_RI, None, hidden_scale(limit), table, matrix, bias_ED, shape),
            y_RD.data_ptr(), current_stream(),
        )  # fmt: skip
        return y_RD


def run_experts(
    library: WideLibrary,
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: OffsetExperts,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
    shape: Shape,
) -> None:
    """The whole operation; weights come as `swapped_tables.with_offsets` makes them."""
    if x_TD.shape[0] == 0:
        return
    if shape.groups:
        cuda_wide.run_experts(
            library.bound, x_TD, expert_ids_TK, expert_weights_TK,
            weights=weights, swiglu_alpha=swiglu_alpha, swiglu_limit=swiglu_limit, out_TD=out_TD,
        )  # fmt: skip
        return
    up, down, plain = weights.gate_up, weights.down, weights.weights
    table = library.fused.sort_by_expert(expert_ids_TK, num_experts=up.shape[0], block_m=shape.rows)
    hidden_RI = library.gate_up(
        *library.bound.quantize_rows(x_TD, table), table, matrix=up, bias_EF=plain.gate_up_bias_EF,
        alpha=swiglu_alpha, limit=swiglu_limit, shape=shape,
    )  # fmt: skip
    y_RD = library.down(
        hidden_RI, table, matrix=down, bias_ED=plain.down_bias_ED, limit=swiglu_limit, shape=shape
    )
    library.fused.combine(y_RD, table, expert_weights_TK, out_TD=out_TD)


def operands(
    x_RC: Tensor, scales_R: Tensor | None, scale: float, table: RowTable,
    matrix: OffsetMatrix, bias_EN: Tensor, shape: Shape,
) -> tuple[int | float | None, ...]:  # fmt: skip
    """Return what both launchers take first."""
    assert table.block_m == shape.rows, "tiles are as long as the table has them"
    return (
        x_RC.data_ptr(), None if scales_R is None else scales_R.data_ptr(), scale, x_RC.shape[0],
        *weight_operands(table, matrix, bias_EN), shape.late_ns, shape.ahead, int(shape.promote),
    )  # fmt: skip
