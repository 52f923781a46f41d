"""Experts of small batches in CUDA C++: 64 rows at a time through wgmma, codes unpacked once whatever the batch.

Weights pass through a ring that the tensor copy engine fills, and are multiplied as E4M3; decode_e4m3.cuh has the
kernel. Takes mxfp4 in the checkpoint's layout. docs/experiments/decode_experts.md has its times.
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
from rose.kernels.moe_experts.e4m3_weights import TILE_ROWS, E4m3Experts, with_exponents
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.utils.math import ceil_div

FEWEST_TOKENS, MAX_TOKENS = 2, 256
"""What was timed; of one token cuda_decode_impl is as fast, and decode_layers takes it where it can."""
CHUNK_BYTES = 8192
COLUMNS = 2880
"""Of both matrices: the loop over a row is laid out at compile time."""
OWN_BYTES = 272 + 128
"""Beside four for each token of a pass: `e4m3_layout` of decode_e4m3.cuh."""
EIGHT = Launch(width=8, warps=12, stages=12)
SIXTEEN = Launch(width=16, warps=12, stages=9)
TWENTY_FOUR = Launch(width=24, warps=12, stages=6)
SHAPES = (EIGHT, SIXTEEN, TWENTY_FOUR)
"""What decode_e4m3_sm90.cu compiles."""
SCALES, PARTS = 2, {8: 2, 16: 2, 24: 1}
"""Buffers of a tile's scales and, by width, of the warpgroups' parts, likewise."""
MOST_FOR = {5: EIGHT, 12: SIXTEEN}
"""Tokens of an expert, on average, up to which a shape is the fastest."""

LIBRARY = CudaLibrary(Path(__file__).with_name("decode_e4m3_sm90.cu"))
EXPERTS = DecodeExperts(LIBRARY)


def shared_bytes(shape: Launch, num_tokens: int, sizes: Sizes) -> int:
    """Return the shared memory of one block, as `e4m3_layout` of decode_e4m3.cuh has it."""
    columns = max(sizes["D"], sizes["I"])
    parts = PARTS[shape.width]
    activations = ceil_div(columns, 128) * shape.width * 256
    scales = SCALES * (TILE_ROWS * columns // 32 + 16)
    ring = shape.stages * CHUNK_BYTES + ceil_div(2 * (shape.stages + parts) + SCALES, 2) * 16
    sums = parts * shape.warps // 4 * TILE_ROWS * shape.width * 4
    own = 4 * shape.width + OWN_BYTES
    return activations + scales + ring + sums + own + list_bytes(shape.width, num_tokens, sizes)


def fits(shape: Launch, num_tokens: int, sizes: Sizes) -> bool:
    """Tell whether a block fits a multiprocessor."""
    return shared_bytes(shape, num_tokens, sizes) <= BLOCK_BYTES


def choose(num_tokens: int, sizes: Sizes) -> Launch:
    """Return the launch shape, measured on an H200 (docs/experiments/decode_experts.md).

    Microseconds 8, 16 and 24 wide. 32 experts: 120, 131, 153 at 32 tokens (four to an expert); 136, 139, 155 at 48;
    217, 159, 169 at 96; 281, 205, 175 at 128. 128 experts: 456, 501, 587 at 128 (four); 541, 524, 712 at 192; 654,
    539, 627 at 256.
    """
    tokens_each = num_tokens * sizes["K"] / sizes["E"]
    return next((shape for most, shape in MOST_FOR.items() if tokens_each <= most), TWENTY_FOUR)


def moe_experts(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: E4m3Experts,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
) -> None:
    """See the contract; weights come as `with_exponents` makes them."""
    num_experts, hidden, inner = weights.weights.down.shape
    sizes = {"D": hidden, "I": inner, "E": num_experts, "K": expert_ids_TK.shape[1]}
    EXPERTS.launch(
        choose(x_TD.shape[0], sizes), x_TD, expert_ids_TK, expert_weights_TK, weights=weights,
        swiglu_alpha=swiglu_alpha, swiglu_limit=swiglu_limit, out_TD=out_TD,
    )  # fmt: skip


def _limits(sizes: Sizes) -> str | None:
    hidden, inner = sizes["D"], sizes["I"]
    if hidden != COLUMNS or inner != COLUMNS:
        return f"D {hidden} and I {inner}; made for rows of {COLUMNS} columns"
    for tokens in range(FEWEST_TOKENS, MAX_TOKENS + 1):
        if not fits(choose(tokens, sizes), tokens, sizes):
            return f"{sizes['K']} experts per token: the lists of {tokens} tokens pass the shared memory"
    return cuda_decode_impl.refusal(sizes) or LIBRARY.refusal()


register(
    Implementation(
        operation="moe_experts",
        name="cuda_e4m3",
        function=moe_experts,
        band=Band.SPECIALISED,
        device="cuda",
        min_capability=(9, 0),
        max_capability=(9, 0),
        formats={"activation": frozenset({"bf16"}), "weight": frozenset({"mxfp4"})},
        phases=frozenset({"decode"}),
        rows=(FEWEST_TOKENS, MAX_TOKENS),
        limits=_limits,
        prepare=with_exponents,
        library=LIBRARY,
        note="64 rows at a time through wgmma as E4M3, loaded by the tensor copy engine",
    )
)
