"""The decode experts of ring.cuh: launches as in rose.kernels.moe_experts.cuda_warpgroup_impl."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rose.kernels import registry
from rose.kernels.build import CudaLibrary
from rose.kernels.registry import Sizes
from rose.kernels.weights import ExpertWeights
from rose.utils.math import ceil_div

registry.load("moe_experts")

from rose.kernels.moe_experts import cuda_decode_impl as narrow  # noqa: E402

TILE_ROWS = 64
_COMBINE_BLOCK = 1024
_BLOCK_BYTES = 227 * 1024

LIBRARY = CudaLibrary(Path(__file__).with_name("ring_sm90.cu"))
LOADS_ALONE = CudaLibrary(LIBRARY.source, defines=("ROSE_LEFT_OUT=2",))
GATE_UP_TYPES = "pppppppiiiiiiffiiiiip"
DOWN_TYPES = "pppppppppiiiiiiiiiip"
_gate_up = LIBRARY.launcher("launch_gate_up_ring", GATE_UP_TYPES)
_down = LIBRARY.launcher("launch_down_ring", DOWN_TYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Launch shape of one call."""

    width: int = 8
    """Tokens of one expert that one pass over its weights serves."""
    groups: int = 4
    """Warpgroups of a block."""
    stages: int = 4
    """Chunks of 8 KB in each warpgroup's ring."""
    is_fused: bool = False
    """The last warpgroup to finish 64 rows adds up the experts of all tokens; otherwise a third kernel does."""


def shared_bytes(shape: Launch, num_tokens: int, sizes: Sizes) -> int:
    """Return the shared memory of one block, as `RingLayout` of ring.cuh has it."""
    columns, num_pairs = max(sizes["D"], sizes["I"]), num_tokens * sizes["K"]
    activations = ceil_div(columns, 128) * shape.width * 256
    scales = 2 * shape.groups * TILE_ROWS * columns // 32
    ring = shape.groups * shape.stages * 8192 + ceil_div(shape.groups * shape.stages * 8, 16) * 16
    hits = min(num_pairs, sizes["E"]) + num_pairs // shape.width + 1
    lists = hits * 16 + (sizes["E"] + 1) * 4 + num_pairs * 4
    return activations + scales + ring + 16 * shape.groups + lists


def fits(shape: Launch, num_tokens: int, sizes: Sizes) -> bool:
    """Tell whether a block fits a multiprocessor."""
    return shared_bytes(shape, num_tokens, sizes) <= _BLOCK_BYTES


def launch(
    shape: Launch,
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: ExpertWeights,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
) -> None:
    """Run with a given launch shape; see the contract of moe_experts."""
    num_tokens, hidden = x_TD.shape
    inner, num_pairs = weights.down.shape[2], expert_ids_TK.numel()
    act_PI = x_TD.new_empty(num_pairs, inner)
    y_PD = x_TD.new_empty(num_pairs, hidden, dtype=torch.float32)
    counters = expert_ids_TK.new_empty(hidden // TILE_ROWS) if shape.is_fused else None
    gate_up(
        shape, x_TD, expert_ids_TK, weights, act_PI, counters,
        alpha=swiglu_alpha, limit=swiglu_limit,
    )  # fmt: skip
    down(shape, act_PI, expert_ids_TK, expert_weights_TK, weights, y_PD, counters, out_TD)
    if counters is None:
        narrow._combine_kernel()[(ceil_div(hidden, _COMBINE_BLOCK), num_tokens)](
            y_PD, expert_ids_TK, expert_weights_TK, out_TD,
            K=expert_ids_TK.shape[1], OUT=hidden, BLOCK=_COMBINE_BLOCK, PDL=True, launch_pdl=True,
        )  # fmt: skip


def gate_up(
    shape: Launch, x_TD: Tensor, ids_TK: Tensor, weights: ExpertWeights, act_PI: Tensor,
    counters: Tensor | None, *, alpha: float, limit: float,
) -> None:  # fmt: skip
    """Write the SwiGLU of every pair, and set the counters to zero."""
    num_experts, hidden, inner = weights.down.shape
    matrix = weights.gate_up
    assert matrix.scales is not None, "takes mxfp4, which comes with scales"
    _gate_up(
        x_TD.data_ptr(), ids_TK.data_ptr(), matrix.values.data_ptr(), matrix.scales.data_ptr(),
        weights.gate_up_bias_EF.data_ptr(), act_PI.data_ptr(), narrow._pointer(counters),
        ids_TK.numel(), ids_TK.shape[1], num_experts, inner, hidden,
        0 if counters is None else counters.numel(), alpha, limit, *_tail(shape, x_TD),
    )  # fmt: skip


def down(
    shape: Launch, act_PI: Tensor, ids_TK: Tensor, weights_TK: Tensor, weights: ExpertWeights,
    y_PD: Tensor, counters: Tensor | None, out_TD: Tensor,
) -> None:  # fmt: skip
    """Write the expert's output of every pair, and with counters their weighted sum."""
    num_experts, hidden, inner = weights.down.shape
    matrix = weights.down
    assert matrix.scales is not None, "takes mxfp4, which comes with scales"
    _down(
        act_PI.data_ptr(), ids_TK.data_ptr(), matrix.values.data_ptr(), matrix.scales.data_ptr(),
        weights.down_bias_ED.data_ptr(), y_PD.data_ptr(), weights_TK.data_ptr(), out_TD.data_ptr(),
        narrow._pointer(counters), ids_TK.numel(), ids_TK.shape[1], num_experts, hidden, inner,
        *_tail(shape, act_PI),
    )  # fmt: skip


def _tail(shape: Launch, x: Tensor) -> tuple[int, ...]:
    blocks = narrow.num_multiprocessors(x.device.index)
    return (shape.width, shape.groups, shape.stages, blocks, True, narrow._stream(x))
