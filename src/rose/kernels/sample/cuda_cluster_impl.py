"""Sampling in CUDA C++: one launch, a cluster of eight blocks per row, filtered or not.

draw_cluster.cuh has the kernel. Nothing else is read or written: no workspace, no second launch.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rose.kernels.build import CudaLibrary
from rose.kernels.registry import Band, Implementation, Sizes, register

MAX_VOCAB = 8 * 26000
"""A block keeps an eighth of a row in shared memory, two blocks a multiprocessor."""

SPILLS = {
    "draw_kernel": (
        24,
        "with filters 6 registers of 64 pass through memory outside the loops over ids; without the bound of 64 "
        "only one block would fit a multiprocessor (128 rows of top-p take 246 us as it is, H200)",
    )
}
LIBRARY = CudaLibrary(Path(__file__).with_name("draw_sm90.cu"))
TYPES = "ppppppppiiiiip"
_draw = LIBRARY.launcher("launch_draw", TYPES)


def sample(
    logits_SV: Tensor,
    temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    min_p_S: Tensor,
    seed_S: Tensor,
    position_S: Tensor,
    *,
    is_filtered: bool,
    tokens_S: Tensor,
) -> None:
    """See the contract."""
    num_rows, vocab = logits_SV.shape
    if num_rows == 0:
        return
    _draw(
        logits_SV.data_ptr(), temperature_S.data_ptr(), top_k_S.data_ptr(), top_p_S.data_ptr(),
        min_p_S.data_ptr(), seed_S.data_ptr(), position_S.data_ptr(), tokens_S.data_ptr(),
        num_rows, vocab, logits_SV.dtype == torch.bfloat16, is_filtered, True, _stream(logits_SV),
    )  # fmt: skip


def _stream(tensor: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(tensor.device.index)


def _limits(sizes: Sizes) -> str | None:
    if sizes["V"] > MAX_VOCAB:
        return f"V is {sizes['V']}; takes up to {MAX_VOCAB}"
    return LIBRARY.refusal()


register(
    Implementation(
        operation="sample",
        name="cuda_cluster",
        function=sample,
        band=Band.SPECIALISED,
        device="cuda",
        min_capability=(9, 0),
        max_capability=(9, 0),
        formats={"logits": frozenset({"float32", "bf16"})},
        limits=_limits,
        library=LIBRARY,
        note="a cluster per row; 128 rows of top-p take 246 us (Triton: 3574)",
    )
)
