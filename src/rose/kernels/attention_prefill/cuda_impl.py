"""Prefill attention in CUDA C++ for Hopper: warp-specialised, TMA and WGMMA (kernel_sm90.cu).

One kernel with compile-time variants; which of them serves full and which
serves windowed layers was decided by benchmarks/attention_variants.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rose.kernels.build import CudaLibrary
from rose.kernels.registry import Band, Implementation, Sizes, register

VARIANTS = (
    "2 warpgroups, 128 keys, plain",
    "2 warpgroups, 128 keys, overlap",
    "2 warpgroups, 128 keys, overlap, turns",
    "3 warpgroups, 128 keys, overlap",
    "3 warpgroups, 128 keys, overlap, turns",
    "3 warpgroups, 128 keys, overlap, turns, polynomial",
    "3 warpgroups, 128 keys, overlap, turns, lazy",
    "3 warpgroups, 128 keys, overlap, turns, polynomial, lazy",
    "3 warpgroups, 64 keys, overlap",
    "2 warpgroups, 192 keys, overlap, turns",
    "2 warpgroups, 192 keys, overlap, turns, polynomial, lazy",
    "2 warpgroups, 64 keys, overlap",
)
"""What the numbers given to `launch_attention_prefill` mean, in order."""

FULL_VARIANT = 6
WINDOW_VARIANT = 8
SOURCE = Path(__file__).with_name("kernel_sm90.cu")
ARGUMENTS = "ipqpqpiippppiiiiifiip"
"""Of `launch_attention_prefill`, as `CudaLibrary.launcher` wants them."""


def variant_library(variants: Iterable[int], *, defines: Iterable[str] = ()) -> CudaLibrary:
    """Return the kernel compiled with these variants only; each takes about two seconds."""
    bits = sum(1 << v for v in set(variants))
    return CudaLibrary(SOURCE, defines=[f"ROSE_VARIANTS={bits:#x}", *defines])


_library = variant_library((FULL_VARIANT, WINDOW_VARIANT))
_launch = _library.launcher("launch_attention_prefill", ARGUMENTS)


@cache
def num_multiprocessors(device_index: int) -> int:
    """Return how many blocks fill a device, at one each."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def call_arguments(
    variant: int,
    q_THD: Tensor,
    kv_pages: Tensor,
    page_table_SP: Tensor,
    query_starts_S1: Tensor,
    lengths_S: Tensor,
    sinks_H: Tensor,
    *,
    scale: float,
    window_tokens: int | None,
    out_THD: Tensor,
) -> tuple[int | float, ...]:
    """Return the launcher's arguments for one call; on the current stream."""
    num_tokens, num_heads, _ = q_THD.shape
    num_pages, _, num_groups, page_tokens, _ = kv_pages.shape
    device_index = q_THD.device.index
    return (
        variant,
        q_THD.data_ptr(),
        q_THD.stride(0),
        kv_pages.data_ptr(),
        num_pages,
        page_table_SP.data_ptr(),
        page_table_SP.stride(0),
        page_table_SP.shape[1],
        query_starts_S1.data_ptr(),
        lengths_S.data_ptr(),
        sinks_H.data_ptr(),
        out_THD.data_ptr(),
        num_tokens,
        lengths_S.shape[0],
        num_heads,
        num_groups,
        page_tokens,
        scale,
        window_tokens or 0,
        num_multiprocessors(device_index),
        torch._C._cuda_getCurrentRawStream(device_index),
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
        *call_arguments(
            FULL_VARIANT if window_tokens is None else WINDOW_VARIANT,
            q_THD,
            kv_pages,
            page_table_SP,
            query_starts_S1,
            lengths_S,
            sinks_H,
            scale=scale,
            window_tokens=window_tokens,
            out_THD=out_THD,
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
        note="WGMMA and TMA, persistent, up to 2048 sequences",
    )
)
