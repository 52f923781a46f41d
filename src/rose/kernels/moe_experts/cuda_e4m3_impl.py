"""Experts of small batches in CUDA C++: 64 rows at a time through wgmma, codes unpacked once whatever the batch.

Weights pass through rings that the tensor copy engine fills, and are multiplied as E4M3; decode_e4m3.cuh has the
kernel. Takes mxfp4 in the checkpoint's layout. docs/experiments/decode_experts.md has its times.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from rose.kernels.build import CudaLibrary
from rose.kernels.moe_experts import cuda_decode_impl
from rose.kernels.moe_experts.cuda_decode_calls import (
    BLOCK_BYTES,
    DecodeExperts,
    Launch,
    list_bytes,
)
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import ExpertWeights
from rose.utils.math import ceil_div

MAX_TOKENS = 256
"""The largest number that was timed."""
TILE_ROWS = 64
CHUNK_BYTES = 8192
COLUMNS = 2880
"""Of both matrices: the loop over a row is laid out at compile time."""
OWN_BYTES = 128
"""Beside four for each token of a pass: `e4m3_layout` of decode_e4m3.cuh."""
EIGHT = Launch(width=8, warps=16, stages=4)
EIGHT_IN_TWELVE_WARPS = Launch(width=8, warps=12, stages=4)
"""Where the lists of more tokens leave no room for the rings of four warpgroups."""
SIXTEEN = Launch(width=16, warps=12, stages=4)
TWENTY_FOUR = Launch(width=24, warps=12, stages=2)
SHAPES = (EIGHT, EIGHT_IN_TWELVE_WARPS, SIXTEEN, TWENTY_FOUR)
"""What decode_e4m3_sm90.cu compiles."""
SIXTEEN_TOKENS = 96
"""Up to here 16 tokens a pass are enough for most of 32 experts."""

LIBRARY = CudaLibrary(Path(__file__).with_name("decode_e4m3_sm90.cu"))
EXPERTS = DecodeExperts(LIBRARY)


def shared_bytes(shape: Launch, num_tokens: int, sizes: Sizes) -> int:
    """Return the shared memory of one block, as `e4m3_layout` of decode_e4m3.cuh has it."""
    columns, groups = max(sizes["D"], sizes["I"]), shape.warps // 4
    activations = ceil_div(columns, 128) * shape.width * 256
    scales = 2 * groups * TILE_ROWS * columns // 32
    ring = groups * shape.stages * CHUNK_BYTES + ceil_div(groups * shape.stages * 8, 16) * 16
    own = 4 * shape.width + OWN_BYTES
    return activations + scales + ring + own + list_bytes(shape.width, num_tokens, sizes)


def fits(shape: Launch, num_tokens: int, sizes: Sizes) -> bool:
    """Tell whether a block fits a multiprocessor."""
    return shared_bytes(shape, num_tokens, sizes) <= BLOCK_BYTES


def choose(num_tokens: int, sizes: Sizes) -> Launch:
    """Return the launch shape, measured on an H200 (docs/experiments/decode_experts.md).

    Microseconds at 64, 96, 128, 256 tokens. 32 experts: 16 wide 165, 186, 237, -; 24 wide 185, 193, 194, 345. 128
    experts: 8 wide 433, 482, 509, - with 16 warps and 443, 490, 521, 718 with 12. Between 32 and 128 experts nothing
    was timed.
    """
    if sizes["E"] < cuda_decode_impl.MANY_EXPERTS:
        return SIXTEEN if num_tokens <= SIXTEEN_TOKENS else TWENTY_FOUR
    return EIGHT if fits(EIGHT, num_tokens, sizes) else EIGHT_IN_TWELVE_WARPS


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
        choose(x_TD.shape[0], sizes), x_TD, expert_ids_TK, expert_weights_TK, weights=weights,
        swiglu_alpha=swiglu_alpha, swiglu_limit=swiglu_limit, out_TD=out_TD,
    )  # fmt: skip


def _limits(sizes: Sizes) -> str | None:
    hidden, inner = sizes["D"], sizes["I"]
    if hidden != COLUMNS or inner != COLUMNS:
        return f"D {hidden} and I {inner}; made for rows of {COLUMNS} columns"
    for tokens in (SIXTEEN_TOKENS, MAX_TOKENS):
        if not fits(choose(tokens, sizes), tokens, sizes):
            return f"{sizes['K']} experts per token: the lists of {tokens} tokens pass the shared memory"
    return cuda_decode_impl.refusal(sizes) or LIBRARY.refusal()


def _many_experts_limits(sizes: Sizes) -> str | None:
    if sizes["E"] < cuda_decode_impl.MANY_EXPERTS:
        return f"{sizes['E']} experts; below {cuda_decode_impl.MANY_EXPERTS} cuda_decode_few_experts is faster"
    return _limits(sizes)


def _implementation(
    name: str, *, rows: tuple[int, int], limits: Callable[[Sizes], str | None]
) -> Implementation:
    return Implementation(
        operation="moe_experts",
        name=name,
        function=moe_experts,
        band=Band.SPECIALISED,
        device="cuda",
        min_capability=(9, 0),
        max_capability=(9, 0),
        formats={"activation": frozenset({"bf16"}), "weight": frozenset({"mxfp4"})},
        phases=frozenset({"decode"}),
        rows=rows,
        limits=limits,
        library=LIBRARY,
        note="64 rows at a time through wgmma as E4M3, loaded by the tensor copy engine",
    )


register(
    _implementation("cuda_e4m3", rows=(cuda_decode_impl.FEW_TOKENS + 1, MAX_TOKENS), limits=_limits)
)
register(
    _implementation(
        "cuda_e4m3_many_experts",
        rows=(cuda_decode_impl.VERY_FEW_TOKENS + 1, cuda_decode_impl.FEW_TOKENS),
        limits=_many_experts_limits,
    )
)
