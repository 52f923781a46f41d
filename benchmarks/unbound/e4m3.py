"""The decode experts of e4m3.cuh: launches as in rose.kernels.moe_experts.cuda_ring_impl."""

from __future__ import annotations

from pathlib import Path

from rose.kernels import registry
from rose.kernels.build import CudaLibrary

registry.load("moe_experts")

from rose.kernels.moe_experts.cuda_decode_calls import DecodeExperts, Launch  # noqa: E402
from rose.kernels.moe_experts.cuda_ring_impl import shared_bytes as ring_bytes  # noqa: E402
from rose.kernels.registry import Sizes  # noqa: E402

LIBRARY = CudaLibrary(Path(__file__).with_name("e4m3_sm90.cu"))
SHARING = CudaLibrary(LIBRARY.source, defines=("ROSE_SHARES",))
"""The warpgroups of a block share out each tile's columns, and do not take turns at tiles."""
EXPERTS = DecodeExperts(LIBRARY)
SHARING_EXPERTS = DecodeExperts(SHARING)
SHAPES = (
    ("e4m3", EXPERTS, Launch(width=8, warps=16, stages=4)),
    ("e4m3 shared", SHARING_EXPERTS, Launch(width=8, warps=16, stages=3)),
    ("e4m3 shared", SHARING_EXPERTS, Launch(width=8, warps=12, stages=4)),
    ("e4m3", EXPERTS, Launch(width=16, warps=12, stages=4)),
    ("e4m3", EXPERTS, Launch(width=24, warps=12, stages=2)),
)


def fits(experts: DecodeExperts, shape: Launch, num_tokens: int, sizes: Sizes) -> bool:
    """Tell whether a block fits a multiprocessor, as `E4m3Layout` of e4m3.cuh has it."""
    parts = 2 * (shape.warps // 4 - 1) * 128 * shape.width * 2 if experts is SHARING_EXPERTS else 0
    factors = 4 * shape.width + 128
    return ring_bytes(shape, num_tokens, sizes) + parts + factors <= 227 * 1024
