"""KV in E4M3 inside Triton kernels: how it is written, and in which type it is multiplied."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_factor(q, kv_dtype: tl.constexpr):
    """Return queries in the type in which they meet keys; keys, weights and values take it too.

    Beside pages in E4M3 bf16 becomes fp16: sm_90 widens two numbers to fp16 in one instruction and has none to bf16.
    Every E4M3 number is an fp16 number, and every bf16 one between 2^-14 and 65504 is.
    """
    if kv_dtype == tl.float8e4nv and q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        q = q.to(tl.float16)
    return q


@triton.jit
def as_stored(x, kv_dtype: tl.constexpr):
    """Round to the type of the pages; in E4M3 past 448 to 448, and NaN stays NaN."""
    if kv_dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(kv_dtype)


@triton.jit
def widened_pair(pairs, dtype: tl.constexpr):
    """Return the two E4M3 numbers in each 16-bit one, the lower byte first."""
    low = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    high = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return low.to(dtype), high.to(dtype)
