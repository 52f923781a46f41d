"""Experts for long steps (prefill_wide_sm90.cu), stages on torch tensors. Reads MXFP4.

Both products take tiles of 256 tokens with one scale for all columns of a token, so that sums stay in the tensor core:
x has one per token, the SwiGLU is in units that follow from its limit. Sort and combine are the fused library's, the
order of columns is that of `cuda_swapped`, weights and their tables those of `swapped_tables`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from rose.kernels.build import CudaLibrary
from rose.kernels.formats import swiglu_unit
from rose.kernels.moe_experts.cuda_fused import FusedLibrary, current_stream
from rose.kernels.moe_experts.cuda_swapped import weight_operands
from rose.kernels.moe_experts.rows import RowTable
from rose.kernels.moe_experts.swapped_tables import OffsetExperts, OffsetMatrix
from rose.kernels.registry import Sizes

ROWS = 256
"""Tokens of a tile at most."""
MAX_COLUMNS = 3072
"""Of a token: a warp keeps all of it in registers while it looks for the largest number."""
MAX_CHOSEN = 4


class WideLibrary:
    """The launchers of prefill_wide_sm90.cu on torch tensors; sort and combine are the fused library's."""

    def __init__(
        self,
        library: CudaLibrary | None = None,
        *,
        fused: FusedLibrary | None = None,
        defines: Sequence[str] = (),
    ) -> None:
        source = Path(__file__).with_name("prefill_wide_sm90.cu")
        self.library = library or CudaLibrary(source, defines=defines)
        self.fused = fused or FusedLibrary(defines=defines)
        launcher = self.library.launcher
        self._quantize = launcher("launch_quantize_tokens", "ppppiiip")
        self._gate_up = launcher("launch_wide_gate_up", "pippppipppiiiifppffp")
        self._down = launcher("launch_wide_down", "pippppipppiiiifpp")

    def build(self) -> None:
        """Compile both sources unless they are compiled."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(CudaLibrary.build, (self.library, self.fused.library)))

    def refusal(self) -> str | None:
        """Say why the sources cannot be compiled here, or None."""
        return self.library.refusal() or self.fused.library.refusal()

    def quantize_rows(self, x_TD: Tensor, table: RowTable) -> tuple[Tensor, Tensor]:
        """Quantise each token once, with one scale, and copy it to its rows in the order that the products read.

        Returns  values e4m3 [R, D]; scales float32 [R]
        """
        tokens, columns = x_TD.shape
        rows = table.row_TK.numel()
        values_RD = x_TD.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
        scales_R = x_TD.new_empty(rows, dtype=torch.float32)
        self._quantize(
            x_TD.data_ptr(), table.row_TK.data_ptr(), values_RD.data_ptr(), scales_R.data_ptr(),
            tokens, columns, table.row_TK.shape[1], current_stream(),
        )  # fmt: skip
        return values_RD, scales_R

    def gate_up(
        self, x_RD: Tensor, scales_R: Tensor, table: RowTable, *,
        matrix: OffsetMatrix, bias_EF: Tensor, alpha: float, limit: float,
    ) -> Tensor:  # fmt: skip
        """Multiply and apply the SwiGLU. Returns e4m3 [R, I] in units of `swiglu_unit(limit)`, as `down` reads it."""
        hidden_RI = x_RD.new_empty(x_RD.shape[0], matrix.shape[1] // 2)
        self._gate_up(
            *operands(x_RD, table, matrix, bias_EF, limit),
            scales_R.data_ptr(), hidden_RI.data_ptr(), alpha, limit, current_stream(),
        )  # fmt: skip
        return hidden_RI

    def down(
        self, hidden_RI: Tensor, table: RowTable, *,
        matrix: OffsetMatrix, bias_ED: Tensor, limit: float,
    ) -> Tensor:  # fmt: skip
        """Multiply and add the bias. Returns bf16 [R, D], not yet weighted."""
        y_RD = hidden_RI.new_empty(hidden_RI.shape[0], matrix.shape[1], dtype=torch.bfloat16)
        self._down(
            *operands(hidden_RI, table, matrix, bias_ED, limit), y_RD.data_ptr(), current_stream()
        )
        return y_RD


def size_limits(sizes: Sizes) -> str | None:
    """Say why the stages cannot take these sizes, or None."""
    if sizes["D"] % 128 != 64 or sizes["D"] > MAX_COLUMNS:
        return f"D = {sizes['D']}; takes 128 k + 64 up to {MAX_COLUMNS}"
    if sizes["I"] % 128 != 64:
        return f"I = {sizes['I']}; takes 128 k + 64"
    if sizes["K"] > MAX_CHOSEN:
        return f"{sizes['K']} experts per token; takes up to {MAX_CHOSEN}"
    return None


def workspace(sizes: Sizes, rows: int, _longest: int) -> int:
    """Bytes of a call: what down reads and writes, which is the most, with a row's number and scale."""
    pairs, hidden, inner = rows * sizes["K"], sizes["D"], sizes["I"]
    return pairs * (inner + 2 * hidden + 2 * 4)


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
) -> None:
    """The whole operation; weights come as `swapped_tables.with_offsets` makes them."""
    if x_TD.shape[0] == 0:
        return
    up, down, plain = weights.gate_up, weights.down, weights.weights
    table = library.fused.sort_by_expert(expert_ids_TK, num_experts=up.shape[0], block_m=ROWS)
    hidden_RI = library.gate_up(
        *library.quantize_rows(x_TD, table), table, matrix=up, bias_EF=plain.gate_up_bias_EF,
        alpha=swiglu_alpha, limit=swiglu_limit,
    )  # fmt: skip
    y_RD = library.down(
        hidden_RI, table, matrix=down, bias_ED=plain.down_bias_ED, limit=swiglu_limit
    )
    library.fused.combine(y_RD, table, expert_weights_TK, out_TD=out_TD)


def operands(
    a_RC: Tensor, table: RowTable, matrix: OffsetMatrix, bias_EN: Tensor, limit: float
) -> tuple[int | float, ...]:
    """Return what both products' launchers take first."""
    assert table.block_m == ROWS, f"tiles of {ROWS} tokens, not {table.block_m}"
    return (
        a_RC.data_ptr(), a_RC.shape[0], *weight_operands(table, matrix, bias_EN), swiglu_unit(limit)
    )  # fmt: skip
