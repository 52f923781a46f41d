"""Experts of small batches in CUDA C++: weights stream once through shared memory, activations in bf16.

Two launches after the router's for up to 16 tokens, three above: gate_up with SwiGLU, down, and the ordered
sum over the chosen experts, which the last block to finish a row does where tokens are few. Each block finds
the chosen experts itself. The checkpoint's layout is read as it is, so prefill and decode share one copy.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rose.kernels.build import CudaLibrary
from rose.kernels.formats import FP8_BLOCK
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import ExpertWeights
from rose.utils.math import ceil_div

MAX_TOKENS = 512
UNIT_ROWS = 16
_COMBINE_BLOCK = 1024
_SM_BYTES = 228 * 1024
_BLOCK_BYTES = 227 * 1024

LIBRARY = CudaLibrary(Path(__file__).with_name("decode_sm90.cu"))
GATE_UP_TYPES = "pppppppiiiiiiffiiiiiiip"
DOWN_TYPES = "pppppppppiiiiiiiiiiiip"
_gate_up = LIBRARY.launcher("launch_gate_up", GATE_UP_TYPES)
_down = LIBRARY.launcher("launch_down", DOWN_TYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Launch shape of one call."""

    tiles: int = 1
    """Eights of tokens that one pass over an expert's weights serves, 1 or 2."""
    warps: int = 8
    """That share out the columns; results depend on it in the last bit."""
    blocks_per_sm: int = 1
    stages: int = 4
    """Units of 16 rows in flight per block."""
    is_dependent: bool = True
    """Programmatic dependent launch: down lists its work and loads its first weights while gate_up drains."""
    is_fused: bool = False
    """The last block to finish a row adds up the experts of all tokens; otherwise a third kernel does."""


def shared_bytes(shape: Launch, num_tokens: int, sizes: Sizes, *, is_fp8: bool = False) -> int:
    """Return the shared memory of one block, as `Layout` of decode_stream.cuh has it."""
    columns, num_pairs = max(sizes["D"], sizes["I"]), num_tokens * sizes["K"]
    stage = UNIT_ROWS * columns if is_fp8 else UNIT_ROWS * columns * 17 // 32
    chunks = columns // 8
    row = (chunks + ((1 if is_fp8 else 2) - chunks) % 8) * 16
    parts = 2 * shape.warps * shape.tiles * 512
    hits = min(num_pairs, sizes["E"]) + num_pairs // (8 * shape.tiles) + 1
    barriers = ceil_div((shape.stages + 4) * 8, 16) * 16
    lists = hits * 16 + (sizes["E"] + 1) * 4 + num_pairs * 4
    return shape.stages * stage + x_rows(shape, num_tokens) * row + parts + barriers + lists


def x_rows(shape: Launch, num_tokens: int) -> int:
    """Return how many tokens' activations a block keeps."""
    return min(num_tokens, 8 * shape.tiles)


def fitted(shape: Launch, num_tokens: int, sizes: Sizes, *, is_fp8: bool = False) -> Launch | None:
    """Return the shape with as many of its stages as fit, or None if fewer than two do."""
    limit = min(_BLOCK_BYTES, _SM_BYTES // shape.blocks_per_sm - 1024)
    for stages in range(shape.stages, 1, -1):
        found = Launch(
            tiles=shape.tiles, warps=shape.warps, blocks_per_sm=shape.blocks_per_sm, stages=stages,
            is_dependent=shape.is_dependent, is_fused=shape.is_fused,
        )  # fmt: skip
        if shared_bytes(found, num_tokens, sizes, is_fp8=is_fp8) <= limit:
            return found
    return None


def choose(num_tokens: int, sizes: Sizes, *, is_fp8: bool = False) -> Launch:
    """Return the launch shape, measured on an H200 (benchmarks/results, docs/performance.md).

    Two blocks per SM hide one's unpacking behind the other's copies; with more than two tokens their shared
    memory leaves two stages each. Microseconds for mxfp4 at 1, 8, 32, 128 tokens: 32 experts 29, 131, 166, -;
    128 experts 30, 160, 393, 639; since codes are unpacked by products 28, 124, 156, - and 28, 152, 374, 595.
    """
    is_fused = num_tokens <= 16
    stages = 4 if num_tokens <= 2 else 2
    wanted = Launch(blocks_per_sm=2, stages=stages, is_fused=is_fused and num_tokens > 2)
    found = fitted(wanted, num_tokens, sizes, is_fp8=is_fp8)
    found = found or fitted(Launch(stages=7, is_fused=is_fused), num_tokens, sizes, is_fp8=is_fp8)
    assert found is not None, f"no launch shape fits {num_tokens} tokens of {dict(sizes)}"
    return found


def moe_experts(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: ExpertWeights,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
) -> None:
    """See the contract."""
    num_tokens, hidden = x_TD.shape
    if num_tokens == 0:
        return
    num_experts, _, inner = weights.down.shape
    sizes = {"D": hidden, "I": inner, "E": num_experts, "K": expert_ids_TK.shape[1]}
    launch(
        choose(num_tokens, sizes, is_fp8=weights.down.format == FP8_BLOCK),
        x_TD, expert_ids_TK, expert_weights_TK, weights=weights,
        swiglu_alpha=swiglu_alpha, swiglu_limit=swiglu_limit, out_TD=out_TD,
    )  # fmt: skip


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
    """Run with a given launch shape; `choose` has the ones in use."""
    num_tokens, hidden = x_TD.shape
    inner, num_pairs = weights.down.shape[2], expert_ids_TK.numel()
    act_PI = x_TD.new_empty(num_pairs, inner)
    y_PD = x_TD.new_empty(num_pairs, hidden, dtype=torch.float32)
    counters = expert_ids_TK.new_empty(hidden // UNIT_ROWS) if shape.is_fused else None
    gate_up(
        shape, x_TD, expert_ids_TK, weights, act_PI, counters,
        alpha=swiglu_alpha, limit=swiglu_limit,
    )  # fmt: skip
    down(shape, act_PI, expert_ids_TK, expert_weights_TK, weights, y_PD, counters, out_TD)
    if counters is None:
        options = {"launch_pdl": True} if shape.is_dependent else {}
        _combine_kernel()[(ceil_div(hidden, _COMBINE_BLOCK), num_tokens)](
            y_PD, expert_ids_TK, expert_weights_TK, out_TD,
            K=expert_ids_TK.shape[1], OUT=hidden, BLOCK=_COMBINE_BLOCK, PDL=shape.is_dependent,
            **options,
        )  # fmt: skip


def gate_up(
    shape: Launch, x_TD: Tensor, ids_TK: Tensor, weights: ExpertWeights, act_PI: Tensor,
    counters: Tensor | None, *, alpha: float, limit: float,
) -> None:  # fmt: skip
    """Write the SwiGLU of every pair, and set the counters to zero."""
    num_experts, hidden, inner = weights.down.shape
    matrix, bias_EF = weights.gate_up, weights.gate_up_bias_EF
    assert bias_EF.dtype == torch.bfloat16, f"biases are {bias_EF.dtype}, must be bf16"
    _gate_up(
        x_TD.data_ptr(), ids_TK.data_ptr(), matrix.values.data_ptr(), _pointer(matrix.scales),
        bias_EF.data_ptr(), act_PI.data_ptr(), _pointer(counters),
        ids_TK.numel(), ids_TK.shape[1], num_experts, inner, hidden,
        0 if counters is None else counters.numel(), alpha, limit, matrix.format == FP8_BLOCK,
        *_tail(shape, x_TD, ids_TK.shape[0]),
    )  # fmt: skip


def down(
    shape: Launch, act_PI: Tensor, ids_TK: Tensor, weights_TK: Tensor, weights: ExpertWeights,
    y_PD: Tensor, counters: Tensor | None, out_TD: Tensor,
) -> None:  # fmt: skip
    """Write the expert's output of every pair, and with counters their weighted sum."""
    num_experts, hidden, inner = weights.down.shape
    matrix, bias_ED = weights.down, weights.down_bias_ED
    assert bias_ED.dtype == torch.bfloat16, f"biases are {bias_ED.dtype}, must be bf16"
    _down(
        act_PI.data_ptr(), ids_TK.data_ptr(), matrix.values.data_ptr(), _pointer(matrix.scales),
        bias_ED.data_ptr(), y_PD.data_ptr(), weights_TK.data_ptr(), out_TD.data_ptr(),
        _pointer(counters), ids_TK.numel(), ids_TK.shape[1], num_experts, hidden, inner,
        matrix.format == FP8_BLOCK, *_tail(shape, act_PI, ids_TK.shape[0]),
    )  # fmt: skip


def _tail(shape: Launch, x: Tensor, num_tokens: int) -> tuple[int, ...]:
    blocks = shape.blocks_per_sm * num_multiprocessors(x.device.index)
    return (
        shape.warps, shape.tiles, shape.stages, x_rows(shape, num_tokens), blocks,
        shape.is_dependent, _stream(x),
    )  # fmt: skip


@cache
def _combine_kernel() -> Any:
    # Imported at the first call: without triton this file is loaded all the same, and refused by `_limits`.
    from rose.kernels.moe_experts.triton_decode_device import combine_kernel

    return combine_kernel


@cache
def num_multiprocessors(device_index: int) -> int:
    """Return the number of multiprocessors of a device."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def _stream(tensor: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(tensor.device.index)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _limits(sizes: Sizes) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed, and the sum over the experts is written in it"
    hidden, inner = sizes["D"], sizes["I"]
    if hidden % 32 or inner % 32:
        return f"D {hidden} and I {inner} must be multiples of 32"
    if sizes["E"] > 1024:
        return f"{sizes['E']} experts; takes up to 1024"
    smallest = Launch(stages=2)
    if fitted(smallest, MAX_TOKENS, sizes, is_fp8=True) is None:
        return f"D {hidden} and I {inner}: two units of {UNIT_ROWS} rows pass the shared memory"
    return LIBRARY.refusal()


def _implementation(name: str, *, rows: tuple[int, int], band: Band) -> Implementation:
    return Implementation(
        operation="moe_experts",
        name=name,
        function=moe_experts,
        band=band,
        device="cuda",
        min_capability=(9, 0),
        max_capability=(9, 0),
        formats={"activation": frozenset({"bf16"}), "weight": frozenset({"mxfp4", "fp8_block"})},
        phases=frozenset({"decode"}),
        rows=rows,
        limits=_limits,
        library=LIBRARY,
        note="weights streamed once through shared memory by bulk copies",
    )


register(_implementation("cuda_decode", rows=(1, 64), band=Band.SPECIALISED))
# With few experts gluon_decode is a little ahead here (32 experts, 128 tokens: 325 us against 332).
register(_implementation("cuda_decode_many_tokens", rows=(65, MAX_TOKENS), band=Band.TUNED))
