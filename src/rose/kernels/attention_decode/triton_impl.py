"""Split-KV decode attention in Triton: one program per sequence, KV head and part of the history.

The query heads of one KV head share its K and V tile (they are the rows of one small matrix product). The
sink opens the running softmax of part 0 only, so it counts once however the history is split. Parts are
combined in order by a second kernel, so the result does not depend on which part finishes first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels import dependent
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.triton_kv import as_factor, widened_pair
from rose.utils.math import ceil_div, next_power_of_two

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Launch shape of one call."""

    block_tokens: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 3
    is_dependent: bool = False
    """Programmatic dependent launch."""


# Where a step's pages and lengths lie, and how wide its table is, changes from step to step. They are read one by one:
# knowing more of them gave the same machine code (pages of 64), compiled again in the middle of serving.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "lengths_ptr"],
)
def _part_kernel(
    q_ptr, kv_ptr, table_ptr, lengths_ptr, sinks_ptr, out_ptr, part_ptr, stats_ptr,
    scale_log2, q_stride, table_stride, page_stride, value_stride, head_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kv_head, split = tl.program_id(0), tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + sequence)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, D)
    head = kv_head * GROUP + row
    is_head = row < GROUP
    q = tl.load(
        q_ptr + sequence * q_stride + head[:, None] * D + column[None, :],
        mask=is_head[:, None],
        other=0.0,
    )
    q = as_factor(q, kv_ptr.dtype.element_ty)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    # Parts are whole blocks, cut evenly over what this sequence really has.
    first_block = first // BLOCK
    num_blocks = (length + BLOCK - 1) // BLOCK - first_block
    part_blocks = (num_blocks + SPLITS - 1) // SPLITS
    begin = first_block + split * part_blocks
    end = tl.minimum(begin + part_blocks, first_block + num_blocks)

    sink = tl.load(sinks_ptr + head, mask=is_head, other=0.0) * 1.4426950408889634
    is_first = split == 0
    m = tl.where(is_first, sink, float("-inf"))
    total = tl.where(is_first, 1.0, 0.0) + tl.zeros([ROWS], tl.float32)
    # E4M3 values are read in pairs: ldmatrix turns 16-bit numbers and no bytes, which would be fetched one by one.
    IS_PAIRED: tl.constexpr = kv_ptr.dtype.element_ty == tl.float8e4nv and D >= 32
    if IS_PAIRED:
        pair_ptr = (kv_ptr + value_stride).to(tl.pointer_type(tl.uint16), bitcast=True)
        pair = tl.arange(0, D // 2)
        acc = tl.zeros([ROWS, D // 2], tl.float32)
        acc_odd = tl.zeros([ROWS, D // 2], tl.float32)
    else:
        acc = tl.zeros([ROWS, D], tl.float32)
    for block in range(begin, end):
        token = block * BLOCK + tl.arange(0, BLOCK)
        is_seen = (token >= first) & (token < length)
        if BLOCK <= PAGE:
            # The whole block is in one page, which holds at least one token that is seen.
            page = tl.load(table_ptr + sequence * table_stride + block * BLOCK // PAGE)
        else:
            page = tl.load(
                table_ptr + sequence * table_stride + token // PAGE, mask=is_seen, other=0
            )
        offset = page.to(tl.int64) * page_stride + kv_head * head_stride + (token % PAGE) * D
        k = tl.load(kv_ptr + offset[:, None] + column[None, :], mask=is_seen[:, None], other=0.0)
        if IS_PAIRED:
            pairs = tl.load(
                pair_ptr + offset[:, None] // 2 + pair[None, :], mask=is_seen[:, None], other=0
            )
            v, v_odd = widened_pair(pairs, q.dtype)
        else:
            v = tl.load(
                kv_ptr + value_stride + offset[:, None] + column[None, :],
                mask=is_seen[:, None],
                other=0.0,
            )
            v = v.to(q.dtype)
        score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale_log2
        score = tl.where(is_seen[None, :], score, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, axis=1))
        shrink = tl.exp2(m - m_new)
        p = tl.exp2(score - m_new[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        if IS_PAIRED:
            acc_odd = acc_odd * shrink[:, None] + tl.dot(
                p.to(v.dtype), v_odd, input_precision="ieee"
            )
        m = m_new
    if IS_PAIRED:
        acc = tl.reshape(tl.join(acc, acc_odd), [ROWS, D])
    if SPLITS == 1:
        out = acc / total[:, None]
        out = tl.where(length > 0, out, 0.0)
        tl.store(
            out_ptr + sequence * NUM_HEADS * D + head[:, None] * D + column[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=is_head[:, None],
        )
    else:
        place = (sequence * NUM_HEADS + head) * SPLITS + split
        tl.store(part_ptr + place[:, None] * D + column[None, :], acc, mask=is_head[:, None])
        tl.store(stats_ptr + place * 2, m, mask=is_head)
        tl.store(stats_ptr + place * 2 + 1, total, mask=is_head)


@triton.jit(do_not_specialize_on_alignment=["lengths_ptr"])
def _combine_kernel(
    part_ptr, stats_ptr, lengths_ptr, out_ptr,
    NUM_HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    split = tl.arange(0, SPLITS_PADDED)
    column = tl.arange(0, D)
    place = (sequence * NUM_HEADS + head) * SPLITS + split
    is_part = split < SPLITS
    m = tl.load(stats_ptr + place * 2, mask=is_part, other=float("-inf"))
    total = tl.load(stats_ptr + place * 2 + 1, mask=is_part, other=0.0)
    weight = tl.exp2(m - tl.max(m, axis=0))
    part = tl.load(
        part_ptr + place[:, None] * D + column[None, :], mask=is_part[:, None], other=0.0
    )
    out = tl.sum(part * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    out = tl.where(tl.load(lengths_ptr + sequence) > 0, out, 0.0)
    tl.store(out_ptr + (sequence * NUM_HEADS + head) * D + column, out.to(out_ptr.dtype.element_ty))


def choose(num_sequences: int, num_kv_heads: int, max_length: int, window: int | None) -> Launch:
    """Choose the launch shape; timed on an H200 (132 SMs), docs/experiments/decode_kernels.md has the table.

    Four programs per SM are wanted: fewer leave the memory idle, more pay for their combination. Windows of
    two pages need no loop; from 64 sequences on, smaller programs fit more to an SM.

    Each number of parts is a kernel of its own. Sequences count as the next power of two, so that steps outside of
    graphs, which have any number, need no other kernels than graphs; with eight kv heads the sizes that graphs are
    captured for get the parts that they would get anyway.
    """
    if window is not None:
        if num_sequences < 64:
            return Launch(block_tokens=128, num_splits=1, num_warps=4, num_stages=1)
        return Launch(block_tokens=64, num_splits=1, num_warps=2, num_stages=2)
    wanted = ceil_div(132 * 4, next_power_of_two(num_sequences) * num_kv_heads)
    # A part of less than two blocks costs more in the combination than it gains.
    most = max(1, max_length // 128)
    return Launch(
        block_tokens=64, num_splits=max(1, min(wanted, most, 128)), num_warps=2, num_stages=4
    )


def run(
    q_SHD: Tensor,
    kv_pages: Tensor,
    page_table_SP: Tensor,
    lengths_S: Tensor,
    sinks_H: Tensor,
    *,
    scale: float,
    window_tokens: int | None,
    out_SHD: Tensor,
    launch: Launch,
) -> None:
    """Launch with a given shape; the benchmark tries many."""
    num_sequences, num_heads, head_dim = q_SHD.shape
    _, _, num_kv_heads, page_tokens, _ = kv_pages.shape
    if num_sequences == 0:
        return
    group = num_heads // num_kv_heads
    splits = launch.num_splits
    part = stats = out_SHD
    if splits > 1:
        shape = (num_sequences, num_heads, splits)
        part = torch.empty((*shape, head_dim), dtype=torch.float32, device=q_SHD.device)
        stats = torch.empty((*shape, 2), dtype=torch.float32, device=q_SHD.device)
    options = dependent.options(launch.is_dependent)
    _part_kernel[(num_kv_heads, splits, num_sequences)](
        q_SHD, kv_pages, page_table_SP, lengths_S, sinks_H, out_SHD, part, stats,
        scale * LOG2_E, q_SHD.stride(0), page_table_SP.stride(0),
        kv_pages.stride(0), kv_pages.stride(1), kv_pages.stride(2),
        NUM_HEADS=num_heads, GROUP=group, ROWS=max(16, next_power_of_two(group)), D=head_dim,
        PAGE=page_tokens, BLOCK=launch.block_tokens, WINDOW=window_tokens or 0, SPLITS=splits,
        PDL=launch.is_dependent, num_warps=launch.num_warps, num_stages=launch.num_stages,
        **options,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(num_heads, num_sequences)](
            part, stats, lengths_S, out_SHD,
            NUM_HEADS=num_heads, D=head_dim, SPLITS=splits,
            SPLITS_PADDED=next_power_of_two(splits), PDL=launch.is_dependent, num_warps=4,
            **options,
        )  # fmt: skip


def attention_decode(
    q_SHD: Tensor,
    kv_pages: Tensor,
    page_table_SP: Tensor,
    lengths_S: Tensor,
    sinks_H: Tensor,
    *,
    scale: float,
    window_tokens: int | None,
    max_length: int,
    out_SHD: Tensor,
) -> None:
    """See the contract."""
    launch = choose(q_SHD.shape[0], kv_pages.shape[2], max_length, window_tokens)
    run(
        q_SHD,
        kv_pages,
        page_table_SP,
        lengths_S,
        sinks_H,
        scale=scale,
        window_tokens=window_tokens,
        out_SHD=out_SHD,
        launch=replace(launch, is_dependent=dependent.pays(q_SHD)),
    )


def _limits(sizes: Sizes) -> str | None:
    if sizes["D"] not in (16, 32, 64, 128):
        return f"head size {sizes['D']}; takes 16, 32, 64, 128"
    return None


register(
    Implementation(
        operation="attention_decode",
        name="triton",
        function=attention_decode,
        band=Band.TUNED,
        device="cuda",
        min_capability=(8, 0),
        formats={
            "activation": frozenset({"bf16", "float32"}),
            "kv": frozenset({"bf16", "float32"}),
        },
        phases=frozenset({"decode", "prefill"}),
        limits=_limits,
        note="split-KV, ordered combination",
    )
)
register(
    Implementation(
        operation="attention_decode",
        name="triton_fp8_kv",
        function=attention_decode,
        band=Band.TUNED,
        device="cuda",
        min_capability=(8, 9),
        formats={"activation": frozenset({"bf16", "float32"}), "kv": frozenset({"fp8_e4m3"})},
        phases=frozenset({"decode", "prefill"}),
        limits=_limits,
        interpreted=frozenset({"float32", "bf16"}),  # products in fp16 are right there
        note="the same over pages in E4M3, widened in registers",
    )
)
