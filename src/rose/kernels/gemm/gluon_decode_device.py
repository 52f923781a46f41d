"""Device code of the decode projections: weight rows streamed once through registers into mma.m16n8k16.

A thread's 16-byte load of a row is already a fragment of operand A, because the order of columns inside a
product is free; activations are read in the same order. The first loads of weights are issued before the
kernel waits for its predecessor (programmatic dependent launch), since weights depend on nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait


@gluon.constexpr_function
def row_layout(parts, warps_m, rows, units, codes, is_token):
    """Layout of rows [parts, rows, units, 4, codes]: `codes` in a row a thread; operand A, or B for tokens."""
    registers = []
    c = 1
    while c < codes:
        registers.append([0, 0, 0, 0, c])
        c *= 2
    u = 1
    while u < units:
        registers.append([0, 0, u, 0, 0])
        u *= 2
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]]
    warps = []
    m = 8
    if not is_token:
        registers.append([0, 8, 0, 0, 0])
        m = 16
    w = 1
    while w < warps_m:
        if is_token:
            warps.append([0, 0, 0, 0, 0])
        else:
            warps.append([0, m, 0, 0, 0])
            m *= 2
        w *= 2
    while m < rows:
        registers.append([0, m, 0, 0, 0])
        m *= 2
    b = 1
    while b < parts:
        warps.append([b, 0, 0, 0, 0])
        b *= 2
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [parts, rows, units, 4, codes])


@gluon.jit
def _offsets(
    row,
    column_stride,
    L: gl.constexpr,
    PARTS: gl.constexpr,
    UNITS: gl.constexpr,
    CODES: gl.constexpr,
):
    """Return element offsets of `row` [rows] and the unit of each, in layout L."""
    L4: gl.constexpr = gl.SliceLayout(4, L)
    L3: gl.constexpr = gl.SliceLayout(3, L4)
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, L3)))
    unit = gl.arange(0, UNITS, layout=gl.SliceLayout(0, gl.SliceLayout(1, L3)))
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L4))))
    code = gl.arange(
        0,
        CODES,
        layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))),
    )
    row = gl.convert_layout(row, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    units = part[:, None, None] * UNITS + unit[None, None, :]
    base = row[None, :, None] * column_stride + units * (4 * CODES)
    offsets = base[:, :, :, None, None] + lane[None, None, None, :, None] * CODES
    return offsets + code[None, None, None, None, :], units[:, :, :, None, None]


@gluon.jit
def _load_rows(
    w_ptr, offsets, units, is_row, step, WIDTH: gl.constexpr, ALL: gl.constexpr, CODES: gl.constexpr
):
    return gl.load(
        w_ptr + offsets + step * (WIDTH * 4 * CODES),
        mask=(units + step * WIDTH < ALL) & is_row,
        other=0.0,
        eviction_policy="evict_first",
    )


@gluon.jit
def gemm_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr, num_tokens, x_stride,
    N: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr, WARPS_M: gl.constexpr,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Write out[token, row] = x W^T + bias + residual, W bf16. Grid: N / ROWS, tokens / TOKENS.

    Warps share out ROWS over WARPS_M and the columns over PARTS, interleaved by UNITS times 32; STAGES such
    steps are in flight per warp. Parts are added in order at the end.
    """
    CODES: gl.constexpr = 8
    ALL: gl.constexpr = COLUMNS // 32
    WIDTH: gl.constexpr = PARTS * UNITS
    STEPS: gl.constexpr = (ALL + WIDTH - 1) // WIDTH
    LW: gl.constexpr = row_layout(PARTS, WARPS_M, ROWS, UNITS, CODES, False)
    LX: gl.constexpr = row_layout(PARTS, WARPS_M, TOKENS, UNITS, CODES, True)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[PARTS, WARPS_M, 1], instr_shape=[1, 16, 8]
    )
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [PARTS * WARPS_M], [0])
    tile, token_tile = gl.program_id(0), gl.program_id(1)
    row = tile * ROWS + gl.arange(0, ROWS, layout=L1)
    w_offsets, w_units = _offsets(gl.minimum(row, N - 1), COLUMNS, LW, PARTS, UNITS, CODES)
    token = token_tile * TOKENS + gl.arange(0, TOKENS, layout=L1)
    x_offsets, x_units = _offsets(token, x_stride, LX, PARTS, UNITS, CODES)
    is_token = gl.convert_layout(
        token < num_tokens,
        gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, LX)))),
    )[None, :, None, None, None]
    w_base = w_ptr

    rows = ()
    for p in gl.static_range(STAGES):
        rows = rows + (_load_rows(w_base, w_offsets, w_units, True, p, WIDTH, ALL, CODES),)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = gl.zeros([PARTS, ROWS, TOKENS], gl.float32, layout=MMA)
    for first in range(0, STEPS, STAGES):
        later = ()
        for p in gl.static_range(STAGES):
            step = first + p
            x = gl.load(
                x_ptr + x_offsets + step * (WIDTH * 32),
                mask=is_token & (x_units + step * WIDTH < ALL),
                other=0.0,
            )
            # Code (c2 c1 c0) of lane t in unit u is column (u c2 c1 t c0) of the product.
            a = rows[p].reshape([PARTS, ROWS, UNITS, 4, 4, 2]).permute([0, 1, 2, 4, 3, 5])
            b = x.reshape([PARTS, TOKENS, UNITS, 4, 4, 2]).permute([0, 2, 4, 3, 5, 1])
            a = a.reshape([PARTS, ROWS, UNITS * 32])
            b = b.reshape([PARTS, UNITS * 32, TOKENS])
            a = gl.convert_layout(a, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
            b = gl.convert_layout(b, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)
            acc = mma_v2(a, b, acc)
            w = _load_rows(w_base, w_offsets, w_units, True, step + STAGES, WIDTH, ALL, CODES)
            later = later + (w,)
        rows = later

    LE: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, PARTS * WARPS_M], [0, 1])
    y = gl.convert_layout(gl.sum(acc, axis=0), LE)
    row_e = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LE))
    token_e = token_tile * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LE))
    is_out = (row_e < N)[:, None] & (token_e < num_tokens)[None, :]
    target = token_e.to(gl.int64)[None, :] * N + row_e[:, None]
    if HAS_BIAS:
        y += gl.load(bias_ptr + row_e, mask=row_e < N, other=0.0).to(gl.float32)[:, None]
    if HAS_RESIDUAL:
        y += gl.load(residual_ptr + target, mask=is_out, other=0.0).to(gl.float32)
    gl.store(out_ptr + target, y.to(out_ptr.dtype.element_ty), mask=is_out)
