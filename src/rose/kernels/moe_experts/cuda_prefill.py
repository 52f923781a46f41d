"""Stages of the experts for many tokens in CUDA C++ (prefill_sm90.cu): one function per launcher.

Nothing is compiled or loaded at import. Outputs and workspace come from torch's caching allocator, so that every
stage may run during graph capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rose.kernels.build import CudaLibrary
from rose.kernels.formats import FormattedTensor
from rose.kernels.moe_experts.rows import RowTable, allocate_rows
from rose.kernels.registry import Sizes
from rose.kernels.weights import ExpertWeights
from rose.utils.math import ceil_div, round_up

TILE_ROWS = 128
X_GROUP = 128
MAX_EXPERTS = 128
MAX_CHOSEN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillShapes:
    """Columns of a tile of each product; a tile has 128 rows."""

    gate_up: int
    """256 or 128: half of them are one group of the SwiGLU's output."""
    down: int
    """256 (only after gate_up 256), 192 or 128."""
    cluster: bool = False
    """Two blocks share each tile of the weights (gate_up 256; down 256 or 192)."""

    @property
    def hidden_group(self) -> int:
        """Return how many SwiGLU channels share a scale."""
        return self.gate_up // 2


VARIANTS = {
    "u256_d256": PrefillShapes(gate_up=256, down=256),
    "u256_d192": PrefillShapes(gate_up=256, down=192),
    "u256_d256_c2": PrefillShapes(gate_up=256, down=256, cluster=True),
    "u256_d192_c2": PrefillShapes(gate_up=256, down=192, cluster=True),
    "u256_d128": PrefillShapes(gate_up=256, down=128),
    "u128_d192": PrefillShapes(gate_up=128, down=192),
    "u128_d128": PrefillShapes(gate_up=128, down=128),
}
"""For benchmarks/moe_prefill_variants.py; measured in docs/performance.md."""
DEFAULT = VARIANTS["u256_d256"]


class PrefillLibrary:
    """The launchers of prefill_sm90.cu on torch tensors."""

    def __init__(self, library: CudaLibrary | None = None, *, defines: Sequence[str] = ()) -> None:
        source = Path(__file__).with_name("prefill_sm90.cu")
        self.library = library or CudaLibrary(source, defines=defines)
        launcher = self.library.launcher
        self._sort = launcher("launch_sort", "piipppppp")
        self._quantize = launcher("launch_quantize", "ppppiiiip")
        self._combine = launcher("launch_combine", "ppppiiip")
        self._expand = launcher("launch_expand", "ppppiiip")
        self._gate_up = launcher("launch_gate_up", "ppiipppippppiiiippiffip")
        self._down = launcher("launch_down", "ppiipppippppiiiipiip")

    def sort_by_expert(self, expert_ids_TK: Tensor, *, num_experts: int) -> RowTable:
        """Give each (token, k) pair its row, stably."""
        table = allocate_rows(expert_ids_TK, num_experts=num_experts, block_m=TILE_ROWS)
        self._sort(
            expert_ids_TK.data_ptr(), expert_ids_TK.numel(), num_experts, table.row_TK.data_ptr(),
            table.starts_E1.data_ptr(), table.tiles_E1.data_ptr(), table.expert_M.data_ptr(),
            table.pairs_E1.data_ptr(), _stream(),
        )  # fmt: skip
        return table

    def quantize_rows(self, x_TD: Tensor, table: RowTable) -> tuple[Tensor, Tensor]:
        """Quantise each token once, in groups of 128 columns, and copy it to its rows.

        Returns  values e4m3 [R, D]; scales float32 [groups, R rounded up to 4]
        """
        tokens, columns = x_TD.shape
        rows = table.row_TK.numel()
        values_RD = x_TD.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
        scales = x_TD.new_empty(ceil_div(columns, X_GROUP), round_up(rows, 4), dtype=torch.float32)
        self._quantize(
            x_TD.data_ptr(), table.row_TK.data_ptr(), values_RD.data_ptr(), scales.data_ptr(),
            tokens, columns, table.row_TK.shape[1], scales.stride(0), _stream(),
        )  # fmt: skip
        return values_RD, scales

    def gate_up(
        self, x_RD: Tensor, x_scales: Tensor, table: RowTable, *,
        values_EFD: Tensor, scales: Tensor, bias_EF: Tensor, alpha: float, limit: float, columns: int,
        cluster: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Multiply, apply the SwiGLU and quantise in groups of columns / 2 channels.

        Returns  values e4m3 [R, I]; scales float32 [groups, R rounded up to 4]
        """
        experts, wide, hidden = values_EFD.shape
        rows = x_RD.shape[0]
        out_RI = x_RD.new_empty(rows, wide // 2)
        out_scales = x_RD.new_empty(ceil_div(wide, columns), round_up(rows, 4), dtype=torch.float32)
        self._gate_up(
            x_RD.data_ptr(), x_scales.data_ptr(), x_scales.stride(0), rows,
            values_EFD.data_ptr(), scales.data_ptr(), bias_EF.data_ptr(), _is_bf16(bias_EF),
            *_rows(table), experts, wide, hidden,
            out_RI.data_ptr(), out_scales.data_ptr(), out_scales.stride(0), alpha, limit,
            columns + 1000 * cluster, _stream(),
        )  # fmt: skip
        return out_RI, out_scales

    def down(
        self, a_RI: Tensor, a_scales: Tensor, table: RowTable, *,
        values_EDI: Tensor, scales: Tensor, bias_ED: Tensor, group: int, columns: int,
        cluster: bool = False,
    ) -> Tensor:  # fmt: skip
        """Multiply and add the bias. Returns bf16 [R, D], not yet weighted."""
        experts, hidden, inner = values_EDI.shape
        y_RD = a_RI.new_empty(a_RI.shape[0], hidden, dtype=torch.bfloat16)
        self._down(
            a_RI.data_ptr(), a_scales.data_ptr(), a_scales.stride(0), a_RI.shape[0],
            values_EDI.data_ptr(), scales.data_ptr(), bias_ED.data_ptr(), _is_bf16(bias_ED),
            *_rows(table), experts, hidden, inner, y_RD.data_ptr(), group, columns + 1000 * cluster, _stream(),
        )  # fmt: skip
        return y_RD

    def combine(
        self, y_RD: Tensor, table: RowTable, expert_weights_TK: Tensor, *, out_TD: Tensor
    ) -> None:
        """Add the weighted rows of each token, k = 0 first, in float32 with one rounding."""
        tokens, columns = out_TD.shape
        self._combine(
            y_RD.data_ptr(), table.row_TK.data_ptr(), expert_weights_TK.data_ptr(), out_TD.data_ptr(),
            tokens, columns, table.row_TK.shape[1], _stream(),
        )  # fmt: skip

    def expand(self, matrix: FormattedTensor, tile_exponents: Tensor, *, out: Tensor) -> Tensor:
        """Turn MXFP4 into E4M3 values of given tile exponents.

        Aliasing  writes and returns the head of the flat e4m3 tensor `out`, as [E, N, K]
        """
        assert matrix.scales is not None, "mxfp4 has scales"
        experts, rows, columns = matrix.shape
        if not out.is_meta:  # the memory plan prepares weights that have no numbers
            self._expand(
                matrix.values.data_ptr(), matrix.scales.data_ptr(), tile_exponents.data_ptr(),
                out.data_ptr(), experts, rows, columns, _stream(),
            )  # fmt: skip
        return out[: experts * rows * columns].view(experts, rows, columns)


def workspace(sizes: Sizes, rows: int, _longest: int) -> int:
    """Bytes of a call: quantised rows, their SwiGLU, the outputs before they are added up."""
    pairs, hidden, inner = rows * sizes["K"], sizes["D"], sizes["I"]
    scales = 4 * pairs * (ceil_div(hidden, X_GROUP) + ceil_div(inner, DEFAULT.hidden_group))
    return pairs * (3 * hidden + inner) + scales


def run_experts(
    library: PrefillLibrary,
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: ExpertWeights,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
    shapes: PrefillShapes = DEFAULT,
) -> None:
    """The whole operation on fp8_block weights."""
    if x_TD.shape[0] == 0:
        return
    gate_up, down = weights.gate_up, weights.down
    assert gate_up.scales is not None, "fp8_block has scales"
    assert down.scales is not None, "fp8_block has scales"
    table = library.sort_by_expert(expert_ids_TK, num_experts=gate_up.values.shape[0])
    x_RD, x_scales = library.quantize_rows(x_TD, table)
    a_RI, a_scales = library.gate_up(
        x_RD, x_scales, table,
        values_EFD=gate_up.values, scales=gate_up.scales, bias_EF=weights.gate_up_bias_EF,
        alpha=swiglu_alpha, limit=swiglu_limit, columns=shapes.gate_up, cluster=shapes.cluster,
    )  # fmt: skip
    y_RD = library.down(
        a_RI, a_scales, table,
        values_EDI=down.values, scales=down.scales, bias_ED=weights.down_bias_ED,
        group=shapes.hidden_group, columns=shapes.down, cluster=shapes.cluster,
    )  # fmt: skip
    library.combine(y_RD, table, expert_weights_TK, out_TD=out_TD)


def _rows(table: RowTable) -> tuple[int, int, int, int, int]:
    return (
        table.starts_E1.data_ptr(),
        table.tiles_E1.data_ptr(),
        table.expert_M.data_ptr(),
        table.pairs_E1.data_ptr(),
        table.max_tiles,
    )


def _is_bf16(bias: Tensor) -> int:
    return int(bias.dtype == torch.bfloat16)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
