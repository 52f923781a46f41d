"""Logits of tokens that a grammar does not allow become -inf, by packed bits, a row of them per slot."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rose.kernels.registry import Operation

BITS = 32
"""Tokens per word of a mask."""


def mask_logits(slots_S: Tensor, masks_RW: Tensor, *, logits_SV: Tensor) -> None:
    """Set logits to -inf where the bit of the token is 0 in the mask of the row's slot.

    Shapes   S rows of the step, R slots, V vocabulary entries, W = ceil(V / 32) words
             slots_S    int64, each in 0..R-1; padding rows share one
             masks_RW   int32 contiguous: bit i % 32 of word i // 32 allows token i
             logits_SV  float32, rows contiguous at any stride
    Aliasing logits_SV is changed in place; logits of allowed tokens keep every bit
    """


def _check_call(*, masks_RW: Tensor, logits_SV: Tensor, **_: Any) -> list[str]:
    words = -(-logits_SV.shape[1] // BITS)
    if masks_RW.shape[1] != words:
        return [f"masks_RW has {masks_RW.shape[1]} words; {logits_SV.shape[1]} logits need {words}"]
    return []


OPERATION = Operation(
    name="mask_logits",
    signature=mask_logits,
    sizes=("V",),
    outputs=(),
    inouts=("logits_SV",),
    formats=("logits",),
    check_call=_check_call,
)
