"""Rotary embedding and KV write in Triton: one program per token rotates all its heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels import dependent
from rose.kernels.registry import Band, Implementation, register
from rose.kernels.triton_kv import as_stored
from rose.utils.math import next_power_of_two


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _kernel(
    qkv_ptr, positions_ptr, cos_sin_ptr, slots_ptr, kv_ptr,
    qkv_stride, page_stride, value_stride, head_stride,
    H: tl.constexpr, H_PADDED: tl.constexpr, G: tl.constexpr, G_PADDED: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, PAGE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    i = tl.arange(0, HALF_PADDED)
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + i, mask=i < HALF, other=0.0)[None, :]
    row_ptr = qkv_ptr + token * qkv_stride
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty

    head = tl.arange(0, H_PADDED)[:, None]
    is_q = (head < H) & (i < HALF)[None, :]
    q_ptr = row_ptr + head * (2 * HALF) + i[None, :]
    low = tl.load(q_ptr, mask=is_q, other=0.0).to(tl.float32)
    high = tl.load(q_ptr + HALF, mask=is_q, other=0.0).to(tl.float32)
    tl.store(q_ptr, (low * cos - high * sin).to(dtype), mask=is_q)
    tl.store(q_ptr + HALF, (high * cos + low * sin).to(dtype), mask=is_q)

    if slot >= 0:
        kv_head = tl.arange(0, G_PADDED)[:, None]
        is_kv = (kv_head < G) & (i < HALF)[None, :]
        k_ptr = row_ptr + (H + kv_head) * (2 * HALF) + i[None, :]
        # Names of their own: inside a branch Triton lets no name change its shape.
        k_low = tl.load(k_ptr, mask=is_kv, other=0.0).to(tl.float32)
        k_high = tl.load(k_ptr + HALF, mask=is_kv, other=0.0).to(tl.float32)
        v_ptr = k_ptr + G * (2 * HALF)
        out_ptr = (
            kv_ptr
            + (slot // PAGE) * page_stride
            + kv_head * head_stride
            + (slot % PAGE) * (2 * HALF)
            + i[None, :]
        )
        kv_dtype: tl.constexpr = kv_ptr.dtype.element_ty
        tl.store(out_ptr, as_stored(k_low * cos - k_high * sin, kv_dtype), mask=is_kv)
        tl.store(out_ptr + HALF, as_stored(k_high * cos + k_low * sin, kv_dtype), mask=is_kv)
        v_low = tl.load(v_ptr, mask=is_kv, other=0.0)
        v_high = tl.load(v_ptr + HALF, mask=is_kv, other=0.0)
        tl.store(out_ptr + value_stride, as_stored(v_low, kv_dtype), mask=is_kv)
        tl.store(out_ptr + value_stride + HALF, as_stored(v_high, kv_dtype), mask=is_kv)


def rope_kv_write(
    qkv_TF: Tensor, positions_T: Tensor, cos_sin_PD: Tensor, slots_T: Tensor, *, kv_pages: Tensor
) -> None:
    """See the contract."""
    launch(
        qkv_TF, positions_T, cos_sin_PD, slots_T, kv_pages=kv_pages,
        is_dependent=dependent.pays(qkv_TF),
    )  # fmt: skip


def launch(
    qkv_TF: Tensor,
    positions_T: Tensor,
    cos_sin_PD: Tensor,
    slots_T: Tensor,
    *,
    kv_pages: Tensor,
    is_dependent: bool,
) -> None:
    """Run with or without programmatic dependent launch."""
    num_tokens, width = qkv_TF.shape
    if num_tokens == 0:
        return
    _, _, num_kv_heads, page_tokens, head_dim = kv_pages.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    _kernel[(num_tokens,)](
        qkv_TF, positions_T, cos_sin_PD, slots_T, kv_pages,
        qkv_TF.stride(0), kv_pages.stride(0), kv_pages.stride(1), kv_pages.stride(2),
        H=num_heads, H_PADDED=next_power_of_two(num_heads),
        G=num_kv_heads, G_PADDED=next_power_of_two(num_kv_heads),
        HALF=head_dim // 2, HALF_PADDED=next_power_of_two(head_dim // 2), PAGE=page_tokens,
        PDL=is_dependent, num_warps=4, **dependent.options(is_dependent),
    )  # fmt: skip


register(
    Implementation(
        operation="rope_kv_write",
        name="triton",
        function=rope_kv_write,
        band=Band.TUNED,
        device="cuda",
        min_capability=(8, 0),
        formats={"kv": frozenset({"bf16", "float32"})},
        note="one program per token",
        is_batch_invariant=True,
    )
)
register(
    Implementation(
        operation="rope_kv_write",
        name="triton_fp8_kv",
        function=rope_kv_write,
        band=Band.TUNED,
        device="cuda",
        min_capability=(8, 9),
        formats={"kv": frozenset({"fp8_e4m3"})},
        interpreted=frozenset(),  # its casts to E4M3 lose carries; a test gives it others
        note="the same with pages in E4M3",
        is_batch_invariant=True,
    )
)
