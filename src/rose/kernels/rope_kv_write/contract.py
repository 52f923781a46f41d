"""Rotary position embedding of q and k, and the write of k and v into their pages, in one pass."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.registry import FormatNames, Operation, Sizes


def rope_kv_write(
    qkv_TF: Tensor, positions_T: Tensor, cos_sin_PD: Tensor, slots_T: Tensor, *, kv_pages: Tensor
) -> None:
    """Rotate q in place; rotate k and write it with v to the slots of their tokens.

    Shapes   T tokens, H query heads, G kv heads, D head size, F = (H + 2 G) D, P positions, L tokens per page
             qkv_TF      activation dtype, rows contiguous: H q heads, then G k heads, then G v heads
             positions_T int64, 0-based
             cos_sin_PD  float32 [P, D]: cos in the first D/2 columns, sin in the others, both times the
                         YaRN concentration
             slots_T     int64: page * L + offset in the page; -1: this token's k and v are not kept
             kv_pages    [pages, 2, G, L, D]: k at index 0, v at index 1; bf16, float32 or float64, or E4M3: without
                         scales, past 448 the largest number
    Aliasing writes the q part of qkv_TF and kv_pages; the k part of qkv_TF may be overwritten by rotated k
             or left (callers must not read it)
    Source   y[i] = x[i] c_i - x[i + D/2] s_i ; y[i + D/2] = x[i + D/2] c_i + x[i] s_i, in float32, one rounding
    """


def _validate(_formats: FormatNames, sizes: Sizes) -> list[str]:
    problems = []
    if sizes["D"] % 2:
        problems.append(f"head size {sizes['D']} is odd; rotary halves it")
    if sizes["H"] % sizes["G"]:
        problems.append(f"{sizes['H']} query heads are no multiple of {sizes['G']} kv heads")
    return problems


OPERATION = Operation(
    name="rope_kv_write",
    signature=rope_kv_write,
    sizes=("H", "G", "D", "L"),
    outputs=(),
    inouts=("qkv_TF", "kv_pages"),
    formats=("activation", "kv"),
    validate=_validate,
)
