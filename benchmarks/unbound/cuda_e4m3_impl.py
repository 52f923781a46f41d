"""Experts of small batches in CUDA C++: 64 rows at a time through wgmma, multiplied as E4M3.

As cuda_ring_impl.py, in whose place it may come; decode_e4m3.cuh has the kernel. Written as it would be bound, and
not registered: README.md of this folder says what decides, and what to change then.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from rose.kernels import registry
from rose.kernels.build import CudaLibrary

registry.load("moe_experts")

from rose.kernels.moe_experts import cuda_decode_impl, cuda_ring_impl  # noqa: E402
from rose.kernels.moe_experts.cuda_decode_calls import (  # noqa: E402
    BLOCK_BYTES,
    DecodeExperts,
    Launch,
)
from rose.kernels.registry import Band, Implementation, Sizes  # noqa: E402
from rose.kernels.weights import ExpertWeights  # noqa: E402

MIN_TOKENS, MAX_TOKENS = 17, 256
"""Two regimes of decode. Graphs pad batches of 17 to 32 tokens to 32, the smallest number at which it was faster."""
MANY_EXPERTS = 128
"""With 32 experts cuda_ring is faster at 64 and 128 tokens (174 and 187 us; 182 and 189 here), cuda_decode at 32 (141
against 145). Between 32 and 128 nothing was timed."""
COLUMNS = cuda_ring_impl.COLUMNS
OWN_BYTES = 128
"""Beside four for each token of a pass: `e4m3_layout` of decode_e4m3.cuh."""
WIDE = Launch(width=8, warps=16, stages=4)
NARROW = Launch(width=8, warps=12, stages=4)
"""Where the lists of more tokens leave no room for the rings of four warpgroups."""
SHAPES = (
    WIDE,
    NARROW,
    Launch(width=16, warps=12, stages=4),
    Launch(width=24, warps=12, stages=2),
)
"""What decode_e4m3_sm90.cu compiles, to be timed."""

LIBRARY = CudaLibrary(Path(__file__).with_name("decode_e4m3_sm90.cu"))
EXPERTS = DecodeExperts(LIBRARY)


def fits(shape: Launch, num_tokens: int, sizes: Sizes) -> bool:
    """Tell whether a block fits a multiprocessor."""
    own = 4 * shape.width + OWN_BYTES
    return cuda_ring_impl.shared_bytes(shape, num_tokens, sizes) + own <= BLOCK_BYTES


def choose(num_tokens: int, sizes: Sizes) -> Launch:
    """Return the launch shape: of 128 experts WIDE took 318, 418 and 493 us at 32, 64 and 128 tokens on an H200."""
    return WIDE if fits(WIDE, num_tokens, sizes) else NARROW


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


def limits(sizes: Sizes) -> str | None:
    """Say why these sizes are not taken, or None."""
    hidden, inner, experts = sizes["D"], sizes["I"], sizes["E"]
    if hidden != COLUMNS or inner != COLUMNS:
        return f"D {hidden} and I {inner}; made for rows of {COLUMNS} columns"
    if experts < MANY_EXPERTS:
        return f"{experts} experts; below {MANY_EXPERTS} cuda_ring and cuda_decode are faster"
    if not fits(NARROW, MAX_TOKENS, sizes):
        return f"{sizes['K']} experts per token: the lists of {MAX_TOKENS} tokens pass the shared memory"
    return cuda_decode_impl.refusal(sizes) or LIBRARY.refusal()


IMPLEMENTATION = Implementation(
    operation="moe_experts",
    name="cuda_e4m3",
    function=moe_experts,
    band=Band.SPECIALISED,
    device="cuda",
    min_capability=(9, 0),
    max_capability=(9, 0),
    formats={"activation": frozenset({"bf16"}), "weight": frozenset({"mxfp4"})},
    phases=frozenset({"decode"}),
    rows=(MIN_TOKENS, MAX_TOKENS),
    limits=limits,
    library=LIBRARY,
    note="64 rows at a time through wgmma as E4M3, loaded by the tensor copy engine",
)
