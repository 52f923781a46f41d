"""The decode experts of e4m3.cuh: launches as in rose.kernels.moe_experts.cuda_ring_impl."""

from __future__ import annotations

from pathlib import Path

from rose.kernels import registry
from rose.kernels.build import CudaLibrary

registry.load("moe_experts")

from rose.kernels.moe_experts.cuda_decode_calls import (  # noqa: E402
    BLOCK_BYTES,
    DecodeExperts,
    Launch,
)
from rose.kernels.moe_experts.cuda_ring_impl import shared_bytes as ring_bytes  # noqa: E402
from rose.kernels.registry import Sizes  # noqa: E402

LIBRARY = CudaLibrary(Path(__file__).with_name("e4m3_sm90.cu"))
EXPERTS = DecodeExperts(LIBRARY)
SHAPES = (
    Launch(width=8, warps=16, stages=4),
    Launch(width=8, warps=12, stages=4),
    Launch(width=16, warps=12, stages=4),
    Launch(width=24, warps=12, stages=2),
)


def fits(shape: Launch, num_tokens: int, sizes: Sizes) -> bool:
    """Tell whether a block fits a multiprocessor, as `E4m3Layout` of e4m3.cuh has it."""
    return ring_bytes(shape, num_tokens, sizes) + 4 * shape.width + 128 <= BLOCK_BYTES
