"""Experts of small batches in CUDA C++: 64 rows at a time through wgmma, codes unpacked once whatever the batch.

Weights pass through rings that the tensor copy engine fills; decode_ring.cuh has the kernel. Takes mxfp4 in the
checkpoint's layout, and pays from about six tokens an expert on.
"""

from __future__ import annotations

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

MAX_TOKENS = 320
"""Where the lists of pairs still fit beside 24 tokens."""
TILE_ROWS = 64
CHUNK_BYTES = 8192
COLUMNS = 2880
"""Of both matrices: the loop over a row is laid out at compile time."""
FEW_EXPERTS = 64
"""Past it cuda_decode is faster: 128 tokens of 128 experts take 521 us against 555. Between 32 and 128 nothing was
timed."""
MIN_TOKENS = cuda_decode_impl.FEW_TOKENS + 1
CHOSEN = Launch(width=24, warps=12, stages=2)
"""On an H200, 64 and 128 tokens of 32 experts take 174 and 187 us so (cuda_decode 197 and 331); 128 tokens 218 with two
warpgroups and three stages, 246 with 16 wide."""

LIBRARY = CudaLibrary(Path(__file__).with_name("decode_ring_sm90.cu"))
EXPERTS = DecodeExperts(LIBRARY)


def shared_bytes(shape: Launch, num_tokens: int, sizes: Sizes) -> int:
    """Return the shared memory of one block, as `RingLayout` of decode_ring.cuh has it."""
    columns, groups = max(sizes["D"], sizes["I"]), shape.warps // 4
    activations = ceil_div(columns, 128) * shape.width * 256
    scales = 2 * groups * TILE_ROWS * columns // 32
    ring = groups * shape.stages * CHUNK_BYTES + ceil_div(groups * shape.stages * 8, 16) * 16
    return activations + scales + ring + list_bytes(shape.width, num_tokens, sizes)


def fits(shape: Launch, num_tokens: int, sizes: Sizes) -> bool:
    """Tell whether a block fits a multiprocessor."""
    return shared_bytes(shape, num_tokens, sizes) <= BLOCK_BYTES


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
    EXPERTS.launch(
        CHOSEN, x_TD, expert_ids_TK, expert_weights_TK, weights=weights,
        swiglu_alpha=swiglu_alpha, swiglu_limit=swiglu_limit, out_TD=out_TD,
    )  # fmt: skip


def _limits(sizes: Sizes) -> str | None:
    hidden, inner, experts = sizes["D"], sizes["I"], sizes["E"]
    if hidden != COLUMNS or inner != COLUMNS:
        return f"D {hidden} and I {inner}; made for rows of {COLUMNS} columns"
    if experts > FEW_EXPERTS:
        return f"{experts} experts; past {FEW_EXPERTS} cuda_decode is faster"
    if not fits(CHOSEN, MAX_TOKENS, sizes):
        return f"{sizes['K']} experts per token: the lists of {MAX_TOKENS} tokens pass the shared memory"
    return cuda_decode_impl.refusal(sizes) or LIBRARY.refusal()


register(
    Implementation(
        operation="moe_experts",
        name="cuda_ring",
        function=moe_experts,
        band=Band.SPECIALISED,
        device="cuda",
        min_capability=(9, 0),
        max_capability=(9, 0),
        formats={"activation": frozenset({"bf16"}), "weight": frozenset({"mxfp4"})},
        phases=frozenset({"decode"}),
        rows=(MIN_TOKENS, MAX_TOKENS),
        limits=_limits,
        library=LIBRARY,
        note="64 rows at a time through wgmma, loaded by the tensor copy engine",
    )
)
