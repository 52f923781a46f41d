"""Experts for long steps (prefill_wide_sm90.cu), stages on torch tensors. Reads MXFP4.

Gate-up takes tiles of 256 tokens with one scale per token, so that its sums stay in the tensor core. Its SwiGLU leaves
as bf16, is rounded in groups of 128 channels and multiplied by the swapped product; sort and combine are the fused
library's, weights and their tables those of `swapped_tables`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rose.kernels.build import CudaLibrary
from rose.kernels.moe_experts import cuda_swapped
from rose.kernels.moe_experts.cuda_fused import HIDDEN_GROUP, current_stream
from rose.kernels.moe_experts.cuda_swapped import SwappedLibrary, weight_operands
from rose.kernels.moe_experts.rows import RowTable
from rose.kernels.moe_experts.swapped_tables import OffsetExperts, OffsetMatrix
from rose.kernels.registry import Sizes
from rose.utils.math import ceil_div

ROWS = 256
"""Tokens of a tile at most."""
MAX_COLUMNS = 3072
"""Of a token: a warp keeps all of it in registers while it looks for the largest number."""
MAX_CHOSEN = 4


class WideLibrary:
    """The launchers of prefill_wide_sm90.cu on torch tensors, beside the swapped library, which has the rest."""

    def __init__(
        self,
        library: CudaLibrary | None = None,
        *,
        swapped: SwappedLibrary | None = None,
        defines: Sequence[str] = (),
    ) -> None:
        source = Path(__file__).with_name("prefill_wide_sm90.cu")
        self.library = library or CudaLibrary(source, defines=defines)
        self.swapped = swapped or SwappedLibrary(defines=defines)
        self.fused = self.swapped.fused
        launcher = self.library.launcher
        self._quantize = launcher("launch_quantize_tokens", "ppppiiip")
        self._gate_up = launcher("launch_wide_gate_up", "ppippppipppiiiipffp")

    def build(self) -> None:
        """Compile all sources unless they are compiled."""
        with ThreadPoolExecutor(2) as pool:
            builds = [pool.submit(self.library.build), pool.submit(self.swapped.build)]
        for build in builds:
            build.result()

    def refusal(self) -> str | None:
        """Say why the sources cannot be compiled here, or None."""
        libraries = (self.library, self.swapped.library, self.fused.library)
        return next(filter(None, (each.refusal() for each in libraries)), None)

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
        """Multiply and apply the SwiGLU. Returns bf16 [R, I], its columns in order."""
        hidden_RI = x_RD.new_empty(x_RD.shape[0], matrix.shape[1] // 2, dtype=torch.bfloat16)
        self._gate_up(
            *operands(x_RD, scales_R, table, matrix, bias_EF),
            hidden_RI.data_ptr(), alpha, limit, current_stream(),
        )  # fmt: skip
        return hidden_RI

    def round_in_groups(self, hidden_RI: Tensor, table: RowTable) -> tuple[Tensor, Tensor]:
        """Round the SwiGLU as the swapped `down` reads it: values e4m3 [R, I], scales float32 [groups, R or more]."""
        rows = torch.arange(len(hidden_RI), dtype=torch.int32, device=hidden_RI.device)
        return self.swapped.quantize_rows(hidden_RI, replace(table, row_TK=rows.unsqueeze(1)))


def size_limits(sizes: Sizes) -> str | None:
    """Say why gate-up cannot take these sizes, or None."""
    if sizes["D"] % 128 != 64 or sizes["D"] > MAX_COLUMNS:
        return f"D = {sizes['D']}; takes 128 k + 64 up to {MAX_COLUMNS}"
    if sizes["K"] > MAX_CHOSEN:
        return f"{sizes['K']} experts per token; takes up to {MAX_CHOSEN}"
    return None


def workspace(sizes: Sizes, rows: int, _longest: int) -> int:
    """Bytes of a call: the most that a stage reads and writes, with scales and the numbers of rows."""
    pairs, hidden, inner = rows * sizes["K"], sizes["D"], sizes["I"]
    gate_up, rounding, down = hidden + 2 * inner, 2 * inner + inner, inner + 2 * hidden
    return pairs * (max(gate_up, rounding, down) + 4 * (4 + ceil_div(inner, HIDDEN_GROUP)))


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
    table, short = (
        library.fused.sort_by_expert(expert_ids_TK, num_experts=up.shape[0], block_m=rows)
        for rows in (ROWS, cuda_swapped.ROWS)
    )
    rounded = library.round_in_groups(
        library.gate_up(
            *library.quantize_rows(x_TD, table), table, matrix=up, bias_EF=plain.gate_up_bias_EF,
            alpha=swiglu_alpha, limit=swiglu_limit,
        ),
        table,
    )  # fmt: skip
    y_RD = library.swapped.down(*rounded, short, matrix=down, bias_ED=plain.down_bias_ED)
    library.fused.combine(y_RD, table, expert_weights_TK, out_TD=out_TD)


def operands(
    x_RD: Tensor, scales_R: Tensor, table: RowTable, matrix: OffsetMatrix, bias_EF: Tensor
) -> tuple[int, ...]:
    """Return gate-up's arguments up to its sizes."""
    assert table.block_m == ROWS, f"tiles of {ROWS} tokens, not {table.block_m}"
    return (
        x_RD.data_ptr(), scales_R.data_ptr(), x_RD.shape[0],
        *weight_operands(table, matrix, bias_EF),
    )  # fmt: skip
