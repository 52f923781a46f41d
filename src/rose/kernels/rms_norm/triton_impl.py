"""RMSNorm in Triton: one program per row holds it in registers, so each element moves once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels import dependent
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.utils.math import next_power_of_two

LARGE_BYTES = 16 << 20
"""Past it the result does not fit into the L2 cache (50 MB on an H200) beside x and the residual stream: those, which
are not read again for long, make room for it."""


@triton.jit
def _kernel(
    x_ptr, weight_ptr, residual_ptr, out_ptr, eps, x_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    # Backwards: who wrote x wrote its last rows last and who reads the result begins with the first, so both find
    # what the L2 cache still holds of more rows than it can hold.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_in = column < D
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + column, mask=is_in, other=0.0, eviction_policy=ONCE)
    weight = tl.load(weight_ptr + column, mask=is_in, other=0.0)
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + row * D + column
        residual = tl.load(residual_ptrs, mask=is_in, other=0.0, eviction_policy=ONCE)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptrs, x, mask=is_in, eviction_policy=ONCE)
    t = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(t * t, axis=0) / D + eps)
    tl.store(
        out_ptr + row * D + column, (t * scale * weight).to(out_ptr.dtype.element_ty), mask=is_in
    )


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, *, eps: float, residual_TD: Tensor | None, out_TD: Tensor
) -> None:
    """See the contract."""
    launch(
        x_TD, weight_D, eps=eps, residual_TD=residual_TD, out_TD=out_TD,
        is_dependent=dependent.pays(x_TD),
    )  # fmt: skip


def launch(
    x_TD: Tensor,
    weight_D: Tensor,
    *,
    eps: float,
    residual_TD: Tensor | None,
    out_TD: Tensor,
    is_dependent: bool,
) -> None:
    """Run with or without programmatic dependent launch."""
    num_tokens, hidden = x_TD.shape
    if num_tokens == 0:
        return
    _kernel[(num_tokens,)](
        x_TD, weight_D, x_TD if residual_TD is None else residual_TD, out_TD, eps, x_TD.stride(0),
        D=hidden, BLOCK=next_power_of_two(hidden), HAS_RESIDUAL=residual_TD is not None,
        PDL=is_dependent, ONCE="evict_first" if out_TD.nbytes > LARGE_BYTES else "",
        num_warps=8 if hidden > 1024 else 4,
        **dependent.options(is_dependent),
    )  # fmt: skip


def _limits(sizes: Sizes) -> str | None:
    return None if sizes["D"] <= 16384 else f"rows of {sizes['D']}; takes up to 16384"


register(
    Implementation(
        operation="rms_norm",
        name="triton",
        function=rms_norm,
        band=Band.TUNED,
        device="cuda",
        min_capability=(8, 0),
        formats={"activation": frozenset({"bf16", "float32"})},
        limits=_limits,
        note="one row per program",
        is_batch_invariant=True,
    )
)
