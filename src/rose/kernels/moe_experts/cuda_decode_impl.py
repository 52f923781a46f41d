"""Experts of small batches in CUDA C++: weights stream once through shared memory, activations in bf16.

Each block finds the chosen experts itself. The checkpoint's layout is read as it is, so prefill and decode share
one copy. decode_stream.cuh has the kernel.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from rose.kernels.build import CudaLibrary
from rose.kernels.formats import FP8_BLOCK
from rose.kernels.moe_experts.cuda_decode_calls import (
    BLOCK_BYTES,
    SM_BYTES,
    DecodeExperts,
    Launch,
    list_bytes,
)
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import ExpertWeights
from rose.utils.math import ceil_div

MAX_TOKENS = 512
FEW_TOKENS = 48
"""Up to here nothing is faster for fp8_block weights of fewer than MANY_EXPERTS."""
MANY_EXPERTS = 128
UNIT_ROWS = 16

LATE_READS = {
    "stream_kernelILb0E": (
        2,
        "down's list of hits: ordinary stores wrote it, once, and no copy ever does",
    )
}
"""For `python -m rose.kernels aot`: number and reason, by a part of the kernel's name."""

LIBRARY = CudaLibrary(Path(__file__).with_name("decode_sm90.cu"))
EXPERTS = DecodeExperts(LIBRARY)


def shared_bytes(shape: Launch, num_tokens: int, sizes: Sizes, *, is_fp8: bool = False) -> int:
    """Return the shared memory of one block, as `Layout` of decode_stream.cuh has it."""
    columns = max(sizes["D"], sizes["I"])
    stage = UNIT_ROWS * columns if is_fp8 else UNIT_ROWS * columns * 17 // 32
    chunks = columns // 8
    row = (chunks + ((1 if is_fp8 else 2) - chunks) % 8) * 16
    parts = 2 * shape.warps * (shape.width // 8) * 512
    barriers = ceil_div((shape.stages + 4) * 8, 16) * 16
    lists = list_bytes(shape.width, num_tokens, sizes)
    return shape.stages * stage + min(num_tokens, shape.width) * row + parts + barriers + lists


def fitted(shape: Launch, num_tokens: int, sizes: Sizes, *, is_fp8: bool = False) -> Launch | None:
    """Return the shape with as many of its stages as fit, or None if fewer than two do."""
    limit = min(BLOCK_BYTES, SM_BYTES // shape.blocks_per_sm - 1024)
    for stages in range(shape.stages, 1, -1):
        found = replace(shape, stages=stages)
        if shared_bytes(found, num_tokens, sizes, is_fp8=is_fp8) <= limit:
            return found
    return None


def choose(num_tokens: int, sizes: Sizes, *, is_fp8: bool = False) -> Launch:
    """Return the launch shape, measured on an H200 (docs/experiments/decode_experts.md).

    Two blocks per SM hide one's unpacking behind the other's copies; with more than two tokens their shared
    memory leaves two stages each. Microseconds for mxfp4 at 1, 32, 64, 128 tokens: 32 experts 26, 141, 197, 331; 128
    experts 26, 330, 476, 559.
    """
    wanted = Launch(blocks_per_sm=2, stages=4 if num_tokens <= 2 else 2)
    found = fitted(wanted, num_tokens, sizes, is_fp8=is_fp8)
    found = found or fitted(Launch(stages=7), num_tokens, sizes, is_fp8=is_fp8)
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
    num_experts, hidden, inner = weights.down.shape
    sizes = {"D": hidden, "I": inner, "E": num_experts, "K": expert_ids_TK.shape[1]}
    EXPERTS.launch(
        choose(x_TD.shape[0], sizes, is_fp8=weights.down.format == FP8_BLOCK),
        x_TD, expert_ids_TK, expert_weights_TK, weights=weights,
        swiglu_alpha=swiglu_alpha, swiglu_limit=swiglu_limit, out_TD=out_TD,
    )  # fmt: skip


def refusal(sizes: Sizes) -> str | None:
    """Say what keeps all CUDA decode experts from taking these sizes, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed, and the sum over the experts is written in it"
    if sizes["E"] > 1024:
        return f"{sizes['E']} experts; takes up to 1024"
    return None


def _limits(sizes: Sizes) -> str | None:
    hidden, inner = sizes["D"], sizes["I"]
    if hidden % 32 or inner % 32:
        return f"D {hidden} and I {inner} must be multiples of 32"
    if fitted(Launch(stages=2), MAX_TOKENS, sizes, is_fp8=True) is None:
        return f"D {hidden} and I {inner}: two units of {UNIT_ROWS} rows pass the shared memory"
    return refusal(sizes) or LIBRARY.refusal()


def _few_experts_limits(sizes: Sizes) -> str | None:
    if sizes["E"] >= MANY_EXPERTS:
        return f"{sizes['E']} experts; from {MANY_EXPERTS} on nothing was timed"
    return _limits(sizes)


def _implementation(
    name: str,
    *,
    rows: tuple[int, int],
    band: Band,
    weights: frozenset[str] = frozenset({"mxfp4", "fp8_block"}),
    limits: Callable[[Sizes], str | None] = _limits,
) -> Implementation:
    return Implementation(
        operation="moe_experts",
        name=name,
        function=moe_experts,
        band=band,
        device="cuda",
        min_capability=(9, 0),
        max_capability=(9, 0),
        formats={"activation": frozenset({"bf16"}), "weight": weights},
        phases=frozenset({"decode"}),
        rows=rows,
        limits=limits,
        library=LIBRARY,
        note="weights streamed once through shared memory by bulk copies",
    )


register(_implementation("cuda_decode", rows=(1, 1), band=Band.SPECIALISED))
register(
    _implementation(
        "cuda_decode_few_experts",
        rows=(2, FEW_TOKENS),
        band=Band.SPECIALISED,
        weights=frozenset({"fp8_block"}),
        limits=_few_experts_limits,
    )
)
# For formats, sizes and numbers of tokens that cuda_e4m3 does not take. With few experts gluon_decode is as fast here
# (32 experts, 128 tokens: 326 us against 329).
register(_implementation("cuda_decode_many_tokens", rows=(2, MAX_TOKENS), band=Band.TUNED))
