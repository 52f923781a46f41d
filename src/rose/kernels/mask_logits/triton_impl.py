"""mask_logits in Triton: writes -inf where a bit is 0 and touches no other logit."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rose.kernels.registry import Band, Implementation, register

_BLOCK = 4096
"""Logits per program: 50 programs a row at gpt-oss's vocabulary. Guessed, not tuned."""


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _kernel(
    slots_ptr, masks_ptr, logits_ptr, num_words, vocab, logits_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Threads of a warp ask for one word together, which the hardware loads once.
    word = tl.load(masks_ptr + slot * num_words + i // 32, mask=i < vocab, other=-1)
    is_banned = ((word >> (i % 32)) & 1) == 0
    tl.store(logits_ptr + row * logits_stride + i, float("-inf"), mask=is_banned & (i < vocab))


def mask_logits(slots_S: Tensor, masks_RW: Tensor, *, logits_SV: Tensor) -> None:
    """See the contract."""
    num_rows, vocab = logits_SV.shape
    if num_rows == 0:
        return
    _kernel[(num_rows, triton.cdiv(vocab, _BLOCK))](
        slots_S, masks_RW, logits_SV, masks_RW.shape[1], vocab, logits_SV.stride(0),
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


register(
    Implementation(
        operation="mask_logits",
        name="triton",
        function=mask_logits,
        band=Band.TUNED,
        device="cuda",
        min_capability=(8, 0),
        formats={"logits": frozenset({"float32"})},
        note="writes only what is banned",
    )
)
