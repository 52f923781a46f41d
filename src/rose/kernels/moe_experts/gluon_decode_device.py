"""Device code of the decode experts: mxfp4 rows streamed once through registers into small matrix products.

Each thread loads 16 bytes of a weight row, which are one mxfp4 block, and turns them in place into the
fragments of eight mma.m16n8k16: the order of columns inside a product is free, so it is chosen such that
weights need no shuffle, and activations are read in the same order. Weights are the M operand.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait

CODE_SCALE = gl.constexpr(2.0**64)
"""`unpack` yields weights times 2^-64, which leaves room for block scales from 2^-69 to 2^65."""


@gluon.constexpr_function
def weight_layout(groups, warps_m, rows):
    """Layout of packed rows [groups, rows, 4 blocks, 4 ints]: as mma's operand A, 16 bytes a thread."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 8, 0, 0]]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    warps = []
    m = 16
    while m < 16 * warps_m:
        warps.append([0, m, 0, 0])
        m *= 2
    while m < rows:
        registers.append([0, m, 0, 0])
        m *= 2
    b = 1
    while b < groups:
        warps.append([b, 0, 0, 0])
        b *= 2
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [groups, rows, 4, 4])


@gluon.constexpr_function
def token_layout(groups, warps_m, tokens):
    """Layout of activations [groups, tokens, 4 blocks, 32]: as mma's operand B."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 0, 16]]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    warps = []
    n = 8
    while n < tokens:
        registers.append([0, n, 0, 0])
        n *= 2
    m = 1
    while m < warps_m:
        warps.append([0, 0, 0, 0])
        m *= 2
    b = 1
    while b < groups:
        warps.append([b, 0, 0, 0])
        b *= 2
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [groups, tokens, 4, 32])


@gluon.jit
def unpack(words, scales):
    """Turn each int32 of eight e2m1 codes into eight bf16, times the pair of bf16 in `scales`.

    The three magnitude bits land on the low exponent bits and the first mantissa bit, which is exact also
    for 0.5 (a bf16 subnormal); two codes sixteen bits apart share every instruction.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 p, q;
        shl.b32 p, $8, 12; shl.b32 q, $8, 6; and.b32 p, p, 0x80008000; and.b32 q, q, 0x01C001C0;
        or.b32 p, p, q; mul.rn.bf16x2 p, p, $9; mov.b32 {$0, $4}, p;
        shl.b32 p, $8, 8; shl.b32 q, $8, 2; and.b32 p, p, 0x80008000; and.b32 q, q, 0x01C001C0;
        or.b32 p, p, q; mul.rn.bf16x2 p, p, $9; mov.b32 {$1, $5}, p;
        shl.b32 p, $8, 4; shr.u32 q, $8, 2; and.b32 p, p, 0x80008000; and.b32 q, q, 0x01C001C0;
        or.b32 p, p, q; mul.rn.bf16x2 p, p, $9; mov.b32 {$2, $6}, p;
        shr.u32 q, $8, 6; and.b32 p, $8, 0x80008000; and.b32 q, q, 0x01C001C0;
        or.b32 p, p, q; mul.rn.bf16x2 p, p, $9; mov.b32 {$3, $7}, p;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, scales],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _load_weights(w_ptr, s_ptr, w_offsets, s_offsets, block_w, block_s, step, BLOCKS: gl.constexpr):
    """Load one step of packed rows and scales: four blocks a row; zeros past the last block."""
    words = gl.load(
        w_ptr + w_offsets + step * 16, mask=block_w + step * 4 < BLOCKS, other=0,
        eviction_policy="evict_first",
    )  # fmt: skip
    scales = gl.load(s_ptr + s_offsets + step * 4, mask=block_s + step * 4 < BLOCKS, other=0)
    return words, scales


@gluon.jit
def stream(
    w_ptr, s_ptr, x_ptr, w_rows, x_rows, is_x,
    GROUPS: gl.constexpr, SPLITS: gl.constexpr, WARPS_M: gl.constexpr, ROWS: gl.constexpr,
    TOKENS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """Multiply weight rows by activations: returns float32 [GROUPS, ROWS, TOKENS], times 2^-64.

    w_rows  row numbers [GROUPS, ROWS, 1];  x_rows, is_x  row numbers and mask [GROUPS, TOKENS, 1]
    Group g takes part g % SPLITS of the columns, interleaved by steps of 128; parts are not yet added.
    STAGES steps of weights are in flight in registers. WAIT: activations come from the kernel before, which
    may still run while the first weights load (programmatic dependent launch).
    """
    BLOCKS: gl.constexpr = COLUMNS // 32
    STEPS: gl.constexpr = (BLOCKS + 4 * SPLITS - 1) // (4 * SPLITS)
    LW: gl.constexpr = weight_layout(GROUPS, WARPS_M, ROWS)
    LX: gl.constexpr = token_layout(GROUPS, WARPS_M, TOKENS)
    LS: gl.constexpr = gl.SliceLayout(3, LW)
    LT: gl.constexpr = gl.SliceLayout(3, LX)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[GROUPS, WARPS_M, 1], instr_shape=[1, 16, 8]
    )
    part_s = gl.arange(0, GROUPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LS))) % SPLITS
    part_x = gl.arange(0, GROUPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LT))) % SPLITS
    lane_s = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LS)))
    lane_x = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LT)))
    block_s = part_s[:, None, None] * 4 + lane_s[None, None, :]
    block_x = part_x[:, None, None] * 4 + lane_x[None, None, :]
    int_w = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LW))))
    column_x = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LX))))
    s_offsets = gl.convert_layout(w_rows, LS) * BLOCKS + block_s
    w_offsets = (s_offsets * 4)[:, :, :, None] + int_w[None, None, None, :]
    block_w = block_s[:, :, :, None]
    x_offsets = (gl.convert_layout(x_rows, LT) * COLUMNS + block_x * 32)[:, :, :, None]
    x_offsets = x_offsets + column_x[None, None, None, :]
    is_row = gl.convert_layout(is_x, LT)

    acc = gl.zeros([GROUPS, ROWS, TOKENS], gl.float32, layout=MMA)
    words = ()
    scales = ()
    for p in gl.static_range(STAGES):
        w, s = _load_weights(
            w_ptr, s_ptr, w_offsets, s_offsets, block_w, block_s, p * SPLITS, BLOCKS
        )
        words = words + (w,)
        scales = scales + (s,)
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    for first in range(0, STEPS, STAGES):
        later_words = ()
        later_scales = ()
        for p in gl.static_range(STAGES):
            step = (first + p) * SPLITS
            is_in = is_row & (block_x + step * 4 < BLOCKS)
            x = gl.load(x_ptr + x_offsets + step * 128, mask=is_in[:, :, :, None], other=0.0)
            s = scales[p].to(gl.int32)
            s = (s * 128 + 62 * 128) * 0x10001
            s, w = gl.broadcast(s[:, :, :, None], words[p])
            v0, v1, v2, v3, v4, v5, v6, v7 = unpack(w, s)
            w, s = _load_weights(
                w_ptr, s_ptr, w_offsets, s_offsets, block_w, block_s, step + STAGES * SPLITS, BLOCKS
            )
            later_words = later_words + (w,)
            later_scales = later_scales + (s,)
            # Code j = 4 j2 + 2 j1 + j0 of int (i1, i0) of block b is column (i1 i0 j1 j0 b j2) of the product.
            even = gl.join(gl.join(v0, v4), gl.join(v2, v6))
            odd = gl.join(gl.join(v1, v5), gl.join(v3, v7))
            a = gl.join(even, odd).reshape([GROUPS, ROWS, 4, 2, 2, 2, 2, 2])
            a = a.permute([0, 1, 3, 4, 6, 7, 2, 5]).reshape([GROUPS, ROWS, 128])
            b = x.reshape([GROUPS, TOKENS, 4, 2, 2, 2, 4]).permute([0, 3, 4, 6, 2, 5, 1])
            b = b.reshape([GROUPS, 128, TOKENS])
            a = gl.convert_layout(a, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
            b = gl.convert_layout(b, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)
            acc = mma_v2(a, b, acc)
        words = later_words
        scales = later_scales
    return acc


@gluon.jit
def find_rows(ids_ptr, num_pairs, expert, wanted, PAIRS: gl.constexpr):
    """Find the pairs that chose `expert`, by their rank among those; every thread looks at all ids.

    Returns  for each element of `wanted` its pair, -1 past the last;  their number;  the first of them
    """
    pair = wanted * 0 - 1
    rank = num_pairs * 0
    leader = rank - 1
    for i in gl.static_range(PAIRS):
        is_hit = gl.load(ids_ptr + i, mask=i < num_pairs, other=-1) == expert
        pair = gl.where(is_hit & (wanted == rank), i, pair)
        leader = gl.where(is_hit & (rank == 0), i, leader)
        rank += is_hit.to(gl.int32)
    return pair, rank, leader


BY_PAIR = gl.constexpr(0)
"""A slot is a (token, choice) pair with its own expert; experts chosen twice are read twice."""
BY_LEADER = gl.constexpr(1)
"""A slot is a pair; the first pair of an expert works for all of them, the others leave."""
BY_EXPERT = gl.constexpr(2)
"""A slot is an expert, which looks for its pairs itself."""
SORTED = gl.constexpr(3)
"""A slot is an expert, whose pairs were listed by a kernel before."""


@gluon.jit
def _pairs_of_slot(
    ids_ptr, order_ptr, starts_ptr, num_pairs, slot, first,
    MODE: gl.constexpr, PAIRS: gl.constexpr, TOKENS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Return (expert, pairs [1, TOKENS, 1] or -1, number of pairs of this slot, 0 if it has no work)."""
    wanted = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    if MODE == BY_PAIR:
        expert = gl.load(ids_ptr + slot)
        count = gl.where(expert >= 0, 1, 0)
        pair = gl.where(wanted == 0, slot, -1)
    elif MODE == SORTED:
        expert = slot
        start = gl.load(starts_ptr + slot)
        count = gl.load(starts_ptr + slot + 1) - start
        is_in = first + wanted < count
        pair = gl.load(order_ptr + start + first + wanted, mask=is_in, other=-1)
    elif MODE == BY_LEADER:
        expert = gl.load(ids_ptr + slot)
        pair, count, leader = find_rows(ids_ptr, num_pairs, expert, first + wanted, PAIRS)
        count = gl.where((leader == slot) & (expert >= 0), count, 0)
    else:
        expert = slot
        pair, count, leader = find_rows(ids_ptr, num_pairs, expert, first + wanted, PAIRS)
    return expert, pair, count


@gluon.jit
def gate_up_kernel(
    x_ptr, ids_ptr, order_ptr, starts_ptr, w_ptr, s_ptr, bias_ptr, act_ptr, num_pairs, alpha, limit,
    K: gl.constexpr, INNER: gl.constexpr, COLUMNS: gl.constexpr, MODE: gl.constexpr,
    PAIRS: gl.constexpr, TOKENS: gl.constexpr, SPLITS: gl.constexpr, WARPS_M: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Write act[pair, channel] = swiglu(x W1^T + b1), rounded. Grid: channels / (16 WARPS_M), slots."""
    C: gl.constexpr = 16 * WARPS_M
    LS: gl.constexpr = gl.SliceLayout(3, weight_layout(SPLITS, WARPS_M, 2 * C))
    LT: gl.constexpr = gl.SliceLayout(3, token_layout(SPLITS, WARPS_M, TOKENS))
    LE: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, SPLITS * WARPS_M], [0, 1])
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile, slot = gl.program_id(0), gl.program_id(1)
    # The tile holds its gate rows first, then its up rows, so that both end in the same thread.
    m = gl.arange(0, 2 * C, layout=gl.SliceLayout(0, gl.SliceLayout(2, LS)))[None, :, None]
    tile_rows = 2 * (tile * C + m % C) + m // C
    channel = tile * C + gl.arange(0, C, layout=gl.SliceLayout(1, LE))
    first = 0
    count = 1
    while first < count:
        expert, pair, count = _pairs_of_slot(
            ids_ptr, order_ptr, starts_ptr, num_pairs, slot, first, MODE, PAIRS, TOKENS, LT
        )
        if count > 0:
            acc = stream(
                w_ptr, s_ptr, x_ptr, expert * (2 * INNER) + tile_rows,
                gl.where(pair >= 0, pair, 0) // K, pair >= 0,
                SPLITS, SPLITS, WARPS_M, 2 * C, TOKENS, COLUMNS, STAGES, False,
            )  # fmt: skip
            u = gl.sum(acc, axis=0) * CODE_SCALE
            gate, up = gl.split(u.reshape([2, C, TOKENS]).permute([1, 2, 0]))
            bias_offset = expert * (2 * INNER) + 2 * channel
            gate_bias = gl.load(bias_ptr + bias_offset).to(gl.float32)
            up_bias = gl.load(bias_ptr + bias_offset + 1).to(gl.float32)
            gate = gl.minimum(gl.convert_layout(gate, LE) + gate_bias[:, None], limit)
            up = gl.convert_layout(up, LE) + up_bias[:, None]
            up = gl.minimum(gl.maximum(up, -limit), limit)
            act = gate / (1.0 + gl.exp(-alpha * gate)) * (up + 1.0)
            target = gl.convert_layout(pair.reshape([TOKENS]), gl.SliceLayout(0, LE))[None, :]
            gl.store(
                act_ptr + target * INNER + channel[:, None],
                act.to(act_ptr.dtype.element_ty),
                mask=target + channel[:, None] * 0 >= 0,
            )
        first += TOKENS


@gluon.jit
def down_kernel(
    act_ptr, ids_ptr, order_ptr, starts_ptr, w_ptr, s_ptr, bias_ptr, y_ptr, num_pairs,
    OUT: gl.constexpr, COLUMNS: gl.constexpr, MODE: gl.constexpr, PAIRS: gl.constexpr,
    TOKENS: gl.constexpr, SPLITS: gl.constexpr, WARPS_M: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Write y[pair, row] = act W2^T + b2 in float32. Grid: OUT / ROWS, slots.

    HAZARD: ids are read before the wait. That is safe because gate_up_kernel lets this one start only after
    it has itself waited for the router.
    """
    LS: gl.constexpr = gl.SliceLayout(3, weight_layout(SPLITS, WARPS_M, ROWS))
    LT: gl.constexpr = gl.SliceLayout(3, token_layout(SPLITS, WARPS_M, TOKENS))
    LE: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, SPLITS * WARPS_M], [0, 1])
    tile, slot = gl.program_id(0), gl.program_id(1)
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LS)))[None, :, None]
    row = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LE))
    first = 0
    count = 1
    while first < count:
        expert, pair, count = _pairs_of_slot(
            ids_ptr, order_ptr, starts_ptr, num_pairs, slot, first, MODE, PAIRS, TOKENS, LT
        )
        if count > 0:
            acc = stream(
                w_ptr, s_ptr, act_ptr, expert * OUT + tile * ROWS + m,
                gl.where(pair >= 0, pair, 0), pair >= 0,
                SPLITS, SPLITS, WARPS_M, ROWS, TOKENS, COLUMNS, STAGES, PDL,
            )  # fmt: skip
            y = gl.convert_layout(gl.sum(acc, axis=0) * CODE_SCALE, LE)
            y += gl.load(bias_ptr + expert * OUT + row).to(gl.float32)[:, None]
            target = gl.convert_layout(pair.reshape([TOKENS]), gl.SliceLayout(0, LE))[None, :]
            gl.store(y_ptr + target * OUT + row[:, None], y, mask=target + row[:, None] * 0 >= 0)
        first += TOKENS
    if PDL:
        gdc_wait()  # also without work: to end means that the kernel before has ended


@gluon.jit
def down_combine_kernel(
    act_ptr, ids_ptr, weights_ptr, w_ptr, s_ptr, bias_ptr, out_ptr,
    K: gl.constexpr, OUT: gl.constexpr, COLUMNS: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Write out[token, row] for one token from all its experts at once. Grid: OUT / 16, tokens.

    Warps share out the K experts (K a power of two) and SPLITS parts of the columns.
    """
    G: gl.constexpr = K * SPLITS
    LS: gl.constexpr = gl.SliceLayout(3, weight_layout(G, 1, 16))
    LT: gl.constexpr = gl.SliceLayout(3, token_layout(G, 1, 8))
    LE: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 16, 2], [1, 1, G], [1, 2, 0])
    L2: gl.constexpr = gl.SliceLayout(0, LE)
    tile, token = gl.program_id(0), gl.program_id(1)
    k_s = gl.arange(0, G, layout=gl.SliceLayout(1, gl.SliceLayout(2, LS))) // SPLITS
    k_t = gl.arange(0, G, layout=gl.SliceLayout(1, gl.SliceLayout(2, LT))) // SPLITS
    expert_s = gl.load(ids_ptr + token * K + k_s)
    is_here_t = (gl.load(ids_ptr + token * K + k_t) >= 0)[:, None, None]
    m = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LS)))[None, :, None]
    n = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LT)))[None, :, None]
    w_rows = gl.maximum(expert_s, 0)[:, None, None] * OUT + tile * 16 + m
    x_rows = (token * K + k_t)[:, None, None] + n * 0
    acc = stream(
        w_ptr, s_ptr, act_ptr, w_rows, x_rows, is_here_t & (n == 0),
        G, SPLITS, 1, 16, 8, COLUMNS, STAGES, PDL,
    )  # fmt: skip
    y = gl.sum(acc.reshape([K, SPLITS, 16, 8]), axis=1)
    y = gl.convert_layout(y, LE) * CODE_SCALE
    k_e = gl.arange(0, K, layout=gl.SliceLayout(1, gl.SliceLayout(2, LE)))[:, None, None]
    row = tile * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, L2))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, L2))
    total = gl.zeros([16, 8], gl.float32, layout=L2)
    for k in gl.static_range(K):
        expert = gl.load(ids_ptr + token * K + k)
        weight = gl.load(weights_ptr + token * K + k).to(gl.float32)
        bias = gl.load(bias_ptr + gl.maximum(expert, 0) * OUT + row).to(gl.float32)
        y_k = gl.sum(gl.where(k_e == k, y, 0.0), axis=0) + bias[:, None]
        total += gl.where(expert >= 0, weight, 0.0) * y_k
    gl.store(
        out_ptr + token * OUT + row[:, None] + column[None, :] * 0,
        total.to(out_ptr.dtype.element_ty),
        mask=(column == 0)[None, :] & (row >= 0)[:, None],
    )
