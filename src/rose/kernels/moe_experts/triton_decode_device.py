"""Small kernels around the decode experts: list the pairs of each expert, add up the chosen experts."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def sort_pairs_kernel(
    ids_ptr, order_ptr, starts_ptr, num_pairs,
    EXPERTS: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """List the pairs by expert, in their own order within one: a counting sort, one program an expert.

    Pair p goes to order[starts[e] + its rank]. Each program counts for itself what lies before its part,
    so programs need nothing from each other. Ids of -1 are left out.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
    is_mine = (ids == expert).to(tl.int32)
    start = tl.sum(((ids >= 0) & (ids < expert)).to(tl.int32), axis=0)
    rank = tl.cumsum(is_mine, axis=0) - 1
    tl.store(order_ptr + start + rank, pair, mask=is_mine > 0)
    tl.store(starts_ptr + expert, start)
    if expert == EXPERTS - 1:
        tl.store(starts_ptr + EXPERTS, start + tl.sum(is_mine, axis=0))


@triton.jit
def combine_kernel(
    y_ptr, ids_ptr, weights_ptr, out_ptr,
    K: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write out[token] = sum over k of weight * y[token, k], k = 0 first. Grid: OUT / BLOCK, tokens."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    is_in = column < OUT
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        pair = token * K + k
        is_here = tl.load(ids_ptr + pair) >= 0
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        total += weight * tl.load(y_ptr + pair * OUT + column, mask=is_in & is_here, other=0.0)
    tl.store(out_ptr + token * OUT + column, total.to(out_ptr.dtype.element_ty), mask=is_in)
