"""Prefill attention in CUDA C++ for Hopper: warp-specialised, TMA and WGMMA (kernel_sm90.cu).

Two kernels are bound: full layers and wide windows have one (full.cuh), narrow windows the other. Both were chosen by
benchmarks/attention_variants.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

from rose.kernels.build import CudaLibrary
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.utils.device import num_multiprocessors

VARIANTS = {38: "pieces of 64 rows, 128 keys, turns", 40: "window at once"}
"""What the numbers given to `launch_attention_prefill` mean: kFullVariant and kWindowVariant in kernel_sm90.cu. Numbers
of docs/experiments/prefill_attention.md that are not here are gone."""

FULL_VARIANT = 38
WINDOW_VARIANT = 40
MAX_WINDOW = 129
"""The widest that WINDOW_VARIANT serves: kMaxWindow of items.cuh. Wider ones get FULL_VARIANT."""

SPILLS = {
    "attention_prefill_full": (
        24,
        "in the producer, which has 32 registers and waits for tiles; none in consumers",
    )
}
"""For `python -m rose.kernels aot`: bytes and reason, by a part of the kernel's name."""

BOUND = (FULL_VARIANT, WINDOW_VARIANT)
SOURCE = Path(__file__).with_name("kernel_sm90.cu")
CALL = Struct("@8P2q9if")
"""`Call` of kernel_sm90.cu: packed, as one argument is cheaper than 21."""


def variant_library(variants: Iterable[int], *, defines: Iterable[str] = ()) -> CudaLibrary:
    """Return the kernel compiled with these variants only; each takes about two seconds."""
    bits = sum(1 << v for v in set(variants))
    return CudaLibrary(SOURCE, defines=[f"ROSE_VARIANTS={bits:#x}", *defines])


_library = variant_library(BOUND)
_launch = _library.launcher("launch_attention_prefill", "p")


def bound_variant(window_tokens: int | None) -> int:
    """Return the variant that serves layers with this window."""
    is_narrow = window_tokens is not None and window_tokens <= MAX_WINDOW
    return WINDOW_VARIANT if is_narrow else FULL_VARIANT


def pack_call(
    variant: int,
    q_THD: Tensor,
    kv_pages: Tensor,
    page_table_SP: Tensor,
    query_starts_S1: Tensor,
    lengths_S: Tensor,
    sinks_H: Tensor,
    scale: float,
    window_tokens: int | None,
    out_THD: Tensor,
) -> bytes:
    """Return what the launcher is called with; on the current stream."""
    num_tokens, num_heads, _ = q_THD.shape
    num_pages, _, num_groups, page_tokens, _ = kv_pages.shape
    device_index = q_THD.get_device()
    return CALL.pack(
        q_THD.data_ptr(),
        kv_pages.data_ptr(),
        page_table_SP.data_ptr(),
        query_starts_S1.data_ptr(),
        lengths_S.data_ptr(),
        sinks_H.data_ptr(),
        out_THD.data_ptr(),
        torch._C._cuda_getCurrentRawStream(device_index),
        q_THD.stride()[0],  # half the time of stride(0), and numel() of shape[0]
        num_pages,
        variant,
        page_table_SP.stride()[0],
        num_tokens,
        lengths_S.numel(),
        num_heads,
        num_groups,
        page_tokens,
        window_tokens or 0,
        num_multiprocessors(device_index),
        scale,
    )


def attention_prefill(
    q_THD: Tensor,
    kv_pages: Tensor,
    page_table_SP: Tensor,
    query_starts_S1: Tensor,
    lengths_S: Tensor,
    sinks_H: Tensor,
    *,
    scale: float,
    window_tokens: int | None,
    max_query_tokens: int,
    out_THD: Tensor,
) -> None:
    """Attend with the variant for full or for windowed layers; see the contract."""
    del max_query_tokens  # the kernel counts its own tiles
    _launch(
        pack_call(
            bound_variant(window_tokens),
            q_THD,
            kv_pages,
            page_table_SP,
            query_starts_S1,
            lengths_S,
            sinks_H,
            scale,
            window_tokens,
            out_THD,
        )
    )


def _limits(sizes: Sizes) -> str | None:
    if sizes["D"] != 64:
        return f"head size is {sizes['D']}, takes 64"
    if sizes["L"] % 64:
        return f"pages of {sizes['L']} tokens, takes multiples of 64"
    return _library.refusal()


register(
    Implementation(
        operation="attention_prefill",
        name="cuda",
        function=attention_prefill,
        band=Band.SPECIALISED,
        device="cuda",
        min_capability=(9, 0),
        max_capability=(9, 0),
        formats={"activation": frozenset({"bf16"}), "kv": frozenset({"bf16"})},
        limits=_limits,
        library=_library,
        note="WGMMA and TMA, persistent, up to 2048 sequences",
    )
)
