"""Causal and windowed prefill attention in Triton: one program per query tile and head.

Heads of one KV head are neighbours in the grid, so that their K and V tiles meet in the L2 cache; the longest
tiles start first. The sink opens the running softmax (maximum = sink, sum = 1): it costs nothing in the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.triton_kv import as_factor
from rose.utils.math import ceil_div

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Launch shape of one call."""

    block_queries: int
    block_tokens: int
    num_warps: int
    num_stages: int


@triton.jit
def _attend(
    q, acc, m, total, kv_base, table_row, position, length, scale_log2, begin, end,
    page_stride, value_stride,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    IS_MASKED: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, D)
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        if BLOCK <= PAGE:
            # The whole block is in one page: a scalar look-up.
            page = tl.load(table_row + start // PAGE)
        else:
            page = tl.load(table_row + token // PAGE, mask=token < length, other=0)
        # A freed page (-1) lies wholly outside the window: its scores are masked below.
        page = tl.maximum(page, 0)
        offset = page.to(tl.int64) * page_stride + (token % PAGE) * D
        k = tl.load(kv_base + offset[:, None] + column[None, :]).to(q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        v = tl.load(kv_base + value_stride + offset[:, None] + column[None, :]).to(q.dtype)
        if IS_MASKED:
            is_seen = token[None, :] <= position[:, None]
            if WINDOW > 0:
                is_seen &= token[None, :] > position[:, None] - WINDOW
            score = tl.where(is_seen, score, float("-inf"))
            # What was never written may be NaN, and 0 * NaN is NaN.
            v = tl.where((token < length)[:, None], v, 0.0)
        m_new = tl.maximum(m, tl.max(score, axis=1) * scale_log2)
        p = tl.exp2(score * scale_log2 - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        m = m_new
    return acc, m, total


@triton.jit(
    do_not_specialize=["table_stride", "num_tiles"],
    do_not_specialize_on_alignment=["table_ptr", "starts_ptr", "lengths_ptr"],
)
def _prefill_kernel(
    q_ptr, kv_ptr, table_ptr, starts_ptr, lengths_ptr, sinks_ptr, out_ptr,
    scale_log2, q_stride, table_stride, page_stride, value_stride, head_stride, num_tiles,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = num_tiles - 1 - tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(starts_ptr + sequence)
    num_rows = tl.load(starts_ptr + sequence + 1) - first_row
    if tile * TILE >= num_rows:
        return
    length = tl.load(lengths_ptr + sequence)
    row = tile * TILE + tl.arange(0, TILE)
    position = length - num_rows + row
    column = tl.arange(0, D)
    token_row = (first_row + row).to(tl.int64)
    is_row = row < num_rows
    q = tl.load(
        q_ptr + token_row[:, None] * q_stride + head * D + column[None, :],
        mask=is_row[:, None],
        other=0.0,
    )
    q = as_factor(q, kv_ptr.dtype.element_ty)
    m = tl.zeros([TILE], tl.float32) + tl.load(sinks_ptr + head) * 1.4426950408889634
    total = tl.full([TILE], 1.0, tl.float32)
    acc = tl.zeros([TILE, D], tl.float32)
    kv_base = kv_ptr + (head // GROUP) * head_stride
    table_row = table_ptr + sequence.to(tl.int64) * table_stride
    low_position = length - num_rows + tile * TILE
    end = tl.minimum(low_position + TILE, length)
    if WINDOW > 0:
        begin = tl.maximum(low_position - WINDOW + 1, 0) // BLOCK * BLOCK
        middle = begin
    else:
        begin = 0
        middle = (low_position + 1) // BLOCK * BLOCK
        acc, m, total = _attend(
            q, acc, m, total, kv_base, table_row, position, length, scale_log2, 0, middle,
            page_stride, value_stride, D, PAGE, BLOCK, WINDOW, False,
        )  # fmt: skip
    acc, m, total = _attend(
        q, acc, m, total, kv_base, table_row, position, length, scale_log2, middle, end,
        page_stride, value_stride, D, PAGE, BLOCK, WINDOW, True,
    )  # fmt: skip
    tl.store(
        out_ptr + token_row[:, None] * (NUM_HEADS * D) + head * D + column[None, :],
        (acc / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=is_row[:, None],
    )


def choose(head_dim: int, window: int | None) -> Launch:
    """Choose the launch shape (docs/experiments/prefill_attention.md has the best times)."""
    if window is not None:
        return Launch(block_queries=64, block_tokens=64, num_warps=4, num_stages=2)
    if head_dim <= 64:
        return Launch(block_queries=128, block_tokens=64, num_warps=8, num_stages=3)
    return Launch(block_queries=64, block_tokens=64, num_warps=4, num_stages=2)


def run(
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
    launch: Launch,
) -> None:
    """Launch with a given shape; the benchmark tries many."""
    _, num_heads, head_dim = q_THD.shape
    num_sequences = lengths_S.shape[0]
    if num_sequences == 0 or max_query_tokens == 0:
        return
    num_tiles = ceil_div(max_query_tokens, launch.block_queries)
    _prefill_kernel[(num_heads, num_tiles, num_sequences)](
        q_THD, kv_pages, page_table_SP, query_starts_S1, lengths_S, sinks_H, out_THD,
        scale * LOG2_E, q_THD.stride(0), page_table_SP.stride(0),
        kv_pages.stride(0), kv_pages.stride(1), kv_pages.stride(2), num_tiles,
        NUM_HEADS=num_heads, GROUP=num_heads // kv_pages.shape[2], D=head_dim,
        PAGE=kv_pages.shape[3], TILE=launch.block_queries, BLOCK=launch.block_tokens,
        WINDOW=window_tokens or 0, num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip


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
    """See the contract."""
    run(
        q_THD,
        kv_pages,
        page_table_SP,
        query_starts_S1,
        lengths_S,
        sinks_H,
        scale=scale,
        window_tokens=window_tokens,
        max_query_tokens=max_query_tokens,
        out_THD=out_THD,
        launch=choose(q_THD.shape[2], window_tokens),
    )


def _limits(sizes: Sizes) -> str | None:
    if sizes["D"] not in (16, 32, 64, 128):
        return f"head size {sizes['D']}; takes 16, 32, 64, 128"
    return None


register(
    Implementation(
        operation="attention_prefill",
        name="triton",
        function=attention_prefill,
        band=Band.TUNED,
        device="cuda",
        min_capability=(8, 0),
        formats={
            "activation": frozenset({"bf16", "float32"}),
            "kv": frozenset({"bf16", "float32"}),
        },
        limits=_limits,
        note="query tile x page tiles, masked tiles apart",
    )
)
register(
    Implementation(
        operation="attention_prefill",
        name="triton_fp8_kv",
        function=attention_prefill,
        band=Band.TUNED,
        device="cuda",
        min_capability=(8, 9),
        formats={"activation": frozenset({"bf16", "float32"}), "kv": frozenset({"fp8_e4m3"})},
        limits=_limits,
        interpreted=frozenset({"float32", "bf16"}),  # products in fp16 are right there
        note="the same over pages in E4M3, widened in registers",
    )
)
