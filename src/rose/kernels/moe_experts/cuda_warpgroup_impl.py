"""Experts of small batches in CUDA C++: 64 rows at a time through wgmma, codes unpacked once whatever the batch.

Launches as in cuda_decode_impl, whose sum over the chosen experts is used too; decode_warpgroup.cuh has the
kernel. Takes mxfp4 in the checkpoint's layout, and pays where an expert has more than eight tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rose.kernels.build import CudaLibrary
from rose.kernels.formats import MXFP4
from rose.kernels.moe_experts import cuda_decode_impl as narrow
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import ExpertWeights
from rose.utils.math import ceil_div

MAX_TOKENS = 512
TILE_ROWS = 64
COLUMNS = 2880
"""Of both matrices: the loop over a row is laid out at compile time."""
FEW_EXPERTS = 64
"""From here on cuda_decode is faster: 128 tokens of 128 experts take 595 us against 605."""
_COMBINE_BLOCK = 1024
_BLOCK_BYTES = 227 * 1024

LIBRARY = CudaLibrary(Path(__file__).with_name("decode_warpgroup_sm90.cu"))
GATE_UP_TYPES = "ppppppppiiiiiiffiiiip"
DOWN_TYPES = "pppppppppiiiiiiiiip"
_gate_up = LIBRARY.launcher("launch_gate_up_wide", GATE_UP_TYPES)
_down = LIBRARY.launcher("launch_down_wide", DOWN_TYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Launch shape of one call."""

    width: int = 8
    """Tokens of one expert that one pass over its weights serves."""
    groups: int = 4
    """Warpgroups of a block."""
    is_dependent: bool = True
    """Programmatic dependent launch, as in cuda_decode_impl."""
    is_fused: bool = False
    """The last warpgroup to finish 64 rows adds up the experts of all tokens; otherwise a third kernel does."""
    fetches: bool = False
    """Blocks of gate_up that are done fetch codes of down into L2."""


def shared_bytes(shape: Launch, num_tokens: int, sizes: Sizes) -> int:
    """Return the shared memory of one block, as `WideLayout` of decode_warpgroup.cuh has it."""
    columns, num_pairs = max(sizes["D"], sizes["I"]), num_tokens * sizes["K"]
    activations = ceil_div(columns, 128) * shape.width * 256
    scales = 2 * shape.groups * TILE_ROWS * columns // 32
    hits = min(num_pairs, sizes["E"]) + num_pairs // shape.width + 1
    lists = hits * 16 + (sizes["E"] + 1) * 4 + num_pairs * 4
    return activations + scales + 16 * shape.groups + lists


def fits(shape: Launch, num_tokens: int, sizes: Sizes) -> bool:
    """Tell whether a block fits a multiprocessor."""
    return shared_bytes(shape, num_tokens, sizes) <= _BLOCK_BYTES


def choose(num_tokens: int, sizes: Sizes) -> Launch:
    """Return the launch shape: on an H200, 128 tokens of 32 experts take 212 us so, 246 with 16 wide, 259 with 32.

    One warpgroup more for 16 tokens, or fewer for 32, do not make up for the second pass or the fewer in flight.
    """
    shape = Launch(width=24, groups=3)
    assert fits(shape, num_tokens, sizes), f"{num_tokens} tokens of {dict(sizes)} pass a block"
    return shape


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
    num_experts, hidden, inner = weights.down.shape
    sizes = {"D": hidden, "I": inner, "E": num_experts, "K": expert_ids_TK.shape[1]}
    launch(
        choose(x_TD.shape[0], sizes), x_TD, expert_ids_TK, expert_weights_TK, weights=weights,
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
    """Run with a given launch shape; see the contract."""
    num_tokens, hidden = x_TD.shape
    if num_tokens == 0:
        return
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
        options = {"launch_pdl": True} if shape.is_dependent else {}
        narrow._combine_kernel()[(ceil_div(hidden, _COMBINE_BLOCK), num_tokens)](
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
    assert matrix.format == MXFP4, f"takes mxfp4, not {matrix.format.name}"
    assert matrix.scales is not None, "mxfp4 comes with scales"
    _gate_up(
        x_TD.data_ptr(), ids_TK.data_ptr(), matrix.values.data_ptr(), matrix.scales.data_ptr(),
        bias_EF.data_ptr(), act_PI.data_ptr(), narrow._pointer(counters),
        weights.down.values.data_ptr() if shape.fetches else 0,
        ids_TK.numel(), ids_TK.shape[1], num_experts, inner, hidden,
        0 if counters is None else counters.numel(), alpha, limit, *_tail(shape, x_TD),
    )  # fmt: skip


def down(
    shape: Launch, act_PI: Tensor, ids_TK: Tensor, weights_TK: Tensor, weights: ExpertWeights,
    y_PD: Tensor, counters: Tensor | None, out_TD: Tensor,
) -> None:  # fmt: skip
    """Write the expert's output of every pair, and with counters their weighted sum."""
    num_experts, hidden, inner = weights.down.shape
    matrix, bias_ED = weights.down, weights.down_bias_ED
    assert bias_ED.dtype == torch.bfloat16, f"biases are {bias_ED.dtype}, must be bf16"
    assert matrix.scales is not None, "mxfp4 comes with scales"
    _down(
        act_PI.data_ptr(), ids_TK.data_ptr(), matrix.values.data_ptr(), matrix.scales.data_ptr(),
        bias_ED.data_ptr(), y_PD.data_ptr(), weights_TK.data_ptr(), out_TD.data_ptr(),
        narrow._pointer(counters), ids_TK.numel(), ids_TK.shape[1], num_experts, hidden, inner,
        *_tail(shape, act_PI),
    )  # fmt: skip


def _tail(shape: Launch, x: Tensor) -> tuple[int, ...]:
    blocks = narrow.num_multiprocessors(x.device.index)
    return (shape.width, shape.groups, blocks, shape.is_dependent, narrow._stream(x))


def _limits(sizes: Sizes) -> str | None:
    hidden, inner, experts = sizes["D"], sizes["I"], sizes["E"]
    if hidden != COLUMNS or inner != COLUMNS:
        return f"D {hidden} and I {inner}; made for rows of {COLUMNS} columns"
    if experts > FEW_EXPERTS:
        return f"{experts} experts; from {FEW_EXPERTS} on cuda_decode is faster at every batch"
    if not fits(Launch(width=24, groups=3), MAX_TOKENS, sizes):
        return f"{sizes['K']} experts per token: the lists of {MAX_TOKENS} tokens pass the shared memory"
    return narrow._limits(sizes) or LIBRARY.refusal()


register(
    Implementation(
        operation="moe_experts",
        name="cuda_warpgroup",
        function=moe_experts,
        band=Band.SPECIALISED,
        device="cuda",
        min_capability=(9, 0),
        max_capability=(9, 0),
        formats={"activation": frozenset({"bf16"}), "weight": frozenset({"mxfp4"})},
        phases=frozenset({"decode"}),
        rows=(65, MAX_TOKENS),
        limits=_limits,
        library=LIBRARY,
        note="64 rows at a time through wgmma; timed in graphs at 128 tokens, not yet in the engine",
    )
)
