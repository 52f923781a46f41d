"""What the CUDA decode experts share on the host: their two launchers, workspace, and the ordered sum.

A library has `launch_gate_up` and `launch_down` of decode_launchers.cuh. Three launches after the router's: gate_up
with SwiGLU, down, and the sum over the chosen experts. A sum by the last block to finish a row, in place of the
third, cost 20 us at 8 tokens: its fence and counter lie in the way of every 16 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rose.kernels import dependent
from rose.kernels.build import CudaLibrary
from rose.kernels.formats import FP8_BLOCK
from rose.kernels.moe_experts.e4m3_weights import E4m3Experts
from rose.kernels.weights import ExpertWeights
from rose.utils.device import num_multiprocessors
from rose.utils.math import ceil_div

SM_BYTES = 228 * 1024
BLOCK_BYTES = 227 * 1024
GATE_UP_TYPES = "pppppppiiiiiffiiiiiip"
DOWN_TYPES = "pppppppiiiiiiiiiiip"
_COMBINE_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Launch shape of one call."""

    width: int = 8
    """Tokens of one expert that one pass over its weights serves."""
    warps: int = 8
    """Of a block, that multiply."""
    stages: int = 4
    """Pieces of weights in flight, of a block: 16 rows (cuda_decode) or a chunk (cuda_e4m3)."""
    blocks_per_sm: int = 1
    is_dependent: bool = True
    """Programmatic dependent launch: down lists its work and loads its first weights while gate_up drains."""


def list_bytes(width: int, num_tokens: int, sizes: dict[str, int] | Any) -> int:
    """Return the shared memory of the lists of hits and pairs, as `list_hits` of decode_call.cuh has them."""
    num_pairs = num_tokens * sizes["K"]
    hits = min(num_pairs, sizes["E"]) + num_pairs // width + 1
    return hits * 16 + (sizes["E"] + 1) * 4 + num_pairs * 4


class DecodeExperts:
    """The launchers of one library."""

    def __init__(self, library: CudaLibrary) -> None:
        self.call_gate_up = library.launcher("launch_gate_up", GATE_UP_TYPES)
        self.call_down = library.launcher("launch_down", DOWN_TYPES)

    def launch(
        self,
        shape: Launch,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        expert_weights_TK: Tensor,
        *,
        weights: ExpertWeights | E4m3Experts,
        swiglu_alpha: float,
        swiglu_limit: float,
        out_TD: Tensor,
    ) -> None:
        """Run with a given launch shape; see the contract. `weights`: as the library's implementation prepares them."""
        num_tokens, hidden = x_TD.shape
        if num_tokens == 0:
            return
        inner, num_pairs = _plain(weights).down.shape[2], expert_ids_TK.numel()
        act_PI = x_TD.new_empty(num_pairs, inner)
        y_PD = x_TD.new_empty(num_pairs, hidden, dtype=torch.float32)
        self.gate_up(
            shape, x_TD, expert_ids_TK, weights, act_PI, alpha=swiglu_alpha, limit=swiglu_limit
        )
        self.down(shape, act_PI, expert_ids_TK, weights, y_PD)
        _combine_kernel()[(ceil_div(hidden, _COMBINE_BLOCK), num_tokens)](
            y_PD, expert_ids_TK, expert_weights_TK, out_TD,
            K=expert_ids_TK.shape[1], OUT=hidden, BLOCK=_COMBINE_BLOCK, PDL=shape.is_dependent,
            **dependent.options(shape.is_dependent),
        )  # fmt: skip

    def gate_up(
        self, shape: Launch, x_TD: Tensor, ids_TK: Tensor, weights: ExpertWeights | E4m3Experts,
        act_PI: Tensor, *, alpha: float, limit: float,
    ) -> None:  # fmt: skip
        """Write the SwiGLU of every pair."""
        plain = _plain(weights)
        num_experts, hidden, inner = plain.down.shape
        matrix, bias_EF = plain.gate_up, plain.gate_up_bias_EF
        exponents = weights.gate_up_exponents_ET if isinstance(weights, E4m3Experts) else None
        assert bias_EF.dtype == torch.bfloat16, f"biases are {bias_EF.dtype}, must be bf16"
        self.call_gate_up(
            x_TD.data_ptr(), ids_TK.data_ptr(), matrix.values.data_ptr(), _pointer(matrix.scales),
            _pointer(exponents), bias_EF.data_ptr(), act_PI.data_ptr(),
            ids_TK.numel(), ids_TK.shape[1], num_experts, inner, hidden, alpha, limit,
            matrix.format == FP8_BLOCK, *_tail(shape, x_TD),
        )  # fmt: skip

    def down(
        self,
        shape: Launch,
        act_PI: Tensor,
        ids_TK: Tensor,
        weights: ExpertWeights | E4m3Experts,
        y_PD: Tensor,
    ) -> None:
        """Write the expert's output of every pair."""
        plain = _plain(weights)
        num_experts, hidden, inner = plain.down.shape
        matrix, bias_ED = plain.down, plain.down_bias_ED
        exponents = weights.down_exponents_ET if isinstance(weights, E4m3Experts) else None
        assert bias_ED.dtype == torch.bfloat16, f"biases are {bias_ED.dtype}, must be bf16"
        self.call_down(
            act_PI.data_ptr(), ids_TK.data_ptr(), matrix.values.data_ptr(),
            _pointer(matrix.scales), _pointer(exponents), bias_ED.data_ptr(), y_PD.data_ptr(),
            ids_TK.numel(), ids_TK.shape[1], num_experts, hidden, inner,
            matrix.format == FP8_BLOCK, *_tail(shape, act_PI),
        )  # fmt: skip


def _plain(weights: ExpertWeights | E4m3Experts) -> ExpertWeights:
    return weights.weights if isinstance(weights, E4m3Experts) else weights


def _tail(shape: Launch, x: Tensor) -> tuple[int, ...]:
    blocks = shape.blocks_per_sm * num_multiprocessors(x.device.index)
    return (shape.width, shape.warps, shape.stages, blocks, shape.is_dependent, _stream(x))


@cache
def _combine_kernel() -> Any:
    # Imported at the first call: without triton the implementations are loaded all the same, and refused by `_limits`.
    from rose.kernels.moe_experts.triton_decode_device import combine_kernel

    return combine_kernel


def _stream(tensor: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(tensor.device.index)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
