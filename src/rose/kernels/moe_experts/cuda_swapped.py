"""Experts for many tokens with swapped operands (prefill_swapped_sm90.cu), stages on torch tensors. Reads MXFP4.

Weights are operand A, expanded into registers.
Activations pass between the stages in the order of columns that the products read; it is nobody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from rose.kernels.build import CudaLibrary
from rose.kernels.moe_experts.cuda_fused import FusedLibrary, current_stream, quantised_rows
from rose.kernels.moe_experts.rows import RowTable
from rose.kernels.moe_experts.swapped_tables import OffsetExperts, OffsetMatrix

ROWS = 128
"""Tokens of a tile at most."""


class SwappedLibrary:
    """The launchers of prefill_swapped_sm90.cu on torch tensors; sort and combine are the fused library's."""

    def __init__(self, library: CudaLibrary | None = None, *, defines: Sequence[str] = ()) -> None:
        source = Path(__file__).with_name("prefill_swapped_sm90.cu")
        self.library = library or CudaLibrary(source, defines=defines)
        self.fused = FusedLibrary(defines=defines)
        launcher = self.library.launcher
        self._quantize = launcher("launch_quantize_turned", "ppppiiiip")
        self._gate_up = launcher("launch_swapped_gate_up", "ppiippppipppiiiippiffp")
        self._down = launcher("launch_swapped_down", "ppiippppipppiiiipp")

    def build(self) -> None:
        """Compile both sources unless they are compiled."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(CudaLibrary.build, (self.library, self.fused.library)))

    def quantize_rows(self, x_TD: Tensor, table: RowTable) -> tuple[Tensor, Tensor]:
        """As FusedLibrary's, columns in the order that the products read."""
        tokens, columns = x_TD.shape
        values_RD, scales = quantised_rows(x_TD, table.row_TK.numel(), columns)
        self._quantize(
            x_TD.data_ptr(), table.row_TK.data_ptr(), values_RD.data_ptr(), scales.data_ptr(),
            tokens, columns, table.row_TK.shape[1], scales.stride(0), current_stream(),
        )  # fmt: skip
        return values_RD, scales

    def gate_up(
        self, x_RD: Tensor, x_scales: Tensor, table: RowTable, *,
        matrix: OffsetMatrix, bias_EF: Tensor, alpha: float, limit: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Multiply, apply the SwiGLU and quantise in groups of 128 channels, in the order that `down` reads.

        Returns  values e4m3 [R, I]; scales float32 [groups, R rounded up to 4]
        """
        out_RI, out_scales = quantised_rows(x_RD, x_RD.shape[0], matrix.shape[1] // 2)
        self._gate_up(
            *operands(x_RD, x_scales, table, matrix, bias_EF),
            out_RI.data_ptr(), out_scales.data_ptr(), out_scales.stride(0), alpha, limit,
            current_stream(),
        )  # fmt: skip
        return out_RI, out_scales

    def down(
        self, a_RI: Tensor, a_scales: Tensor, table: RowTable, *,
        matrix: OffsetMatrix, bias_ED: Tensor,
    ) -> Tensor:  # fmt: skip
        """Multiply and add the bias. Returns bf16 [R, D], not yet weighted."""
        y_RD = a_RI.new_empty(a_RI.shape[0], matrix.shape[1], dtype=torch.bfloat16)
        self._down(
            *operands(a_RI, a_scales, table, matrix, bias_ED),
            y_RD.data_ptr(), current_stream(),
        )  # fmt: skip
        return y_RD


def run_experts(
    library: SwappedLibrary,
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: OffsetExperts,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
) -> None:
    """The whole operation; weights come as `swapped_tables.with_offsets` makes them."""
    if x_TD.shape[0] == 0:
        return
    up, down, plain = weights.gate_up, weights.down, weights.weights
    table = library.fused.sort_by_expert(expert_ids_TK, num_experts=up.shape[0], block_m=ROWS)
    hidden = library.gate_up(
        *library.quantize_rows(x_TD, table), table, matrix=up, bias_EF=plain.gate_up_bias_EF,
        alpha=swiglu_alpha, limit=swiglu_limit,
    )  # fmt: skip
    y_RD = library.down(*hidden, table, matrix=down, bias_ED=plain.down_bias_ED)
    library.fused.combine(y_RD, table, expert_weights_TK, out_TD=out_TD)


def operands(
    a_RC: Tensor, a_scales: Tensor, table: RowTable, matrix: OffsetMatrix, bias_EN: Tensor
) -> tuple[int, ...]:
    """Return a product's arguments up to its sizes."""
    assert table.block_m == ROWS, f"tiles of {ROWS} tokens, not {table.block_m}"
    return (
        a_RC.data_ptr(), a_scales.data_ptr(), a_scales.stride(0), a_RC.shape[0],
        *weight_operands(table, matrix, bias_EN),
    )  # fmt: skip


def weight_operands(table: RowTable, matrix: OffsetMatrix, bias_EN: Tensor) -> tuple[int, ...]:
    """Return what every product's launcher takes behind its activations: weights, tiles, sizes."""
    return (
        matrix.codes.data_ptr(), matrix.offsets.data_ptr(), matrix.row_scales.data_ptr(),
        bias_EN.data_ptr(), int(bias_EN.dtype == torch.bfloat16),
        table.starts_E1.data_ptr(), table.tiles_E1.data_ptr(), table.expert_M.data_ptr(),
        table.max_tiles, *matrix.shape,
    )  # fmt: skip


def in_order(values_RC: Tensor) -> Tensor:
    """Return activations with their columns in the plain order; for checks."""
    rows, columns = values_RC.shape
    whole = columns // 128 * 128
    data = values_RC.view(torch.uint8)
    turned = (
        data[:, :whole].reshape(rows, whole // 128, 8, 4, 4).transpose(2, 3).reshape(rows, whole)
    )
    rest = (
        data[:, whole:]
        .reshape(rows, (columns - whole) // 64, 4, 4, 4)
        .transpose(2, 3)
        .reshape(rows, columns - whole)
    )
    return torch.cat([turned, rest], dim=1).view(values_RC.dtype)
