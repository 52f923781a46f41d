"""The fused CUDA experts, as far as a machine without a GPU can tell: code, index logic, layouts in shared memory."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rose.kernels import build, registry
from rose.kernels.formats import MXFP4, FormattedTensor
from rose.kernels.moe_experts import cuda_fused
from rose.kernels.moe_experts.mxfp4_tiles import tile_exponents
from rose.quant.fp8 import from_mxfp4

FOLDER = Path(cuda_fused.__file__).parent
needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")
COLUMNS = BLOCK_K = 128
SLAB = 64


@pytest.mark.slow
@needs_nvcc
def test_kernels_compile_without_warnings_and_spill_only_between_tiles() -> None:
    built = cuda_fused.FusedLibrary().library.build()
    assert "warning" not in built.log
    assert "Performance Loss" not in built.log
    functions = re.split(r"\n\s*Function : ", build.disassemble(built.path))[1:]
    products = [f for f in functions if "7product" in f.split("\n")[0]]
    assert len(products) == 6
    for code in products:
        assert "USETMAXREG" in code
        assert "UTMALDG" in code
        # From the first tensor-core instruction to the last: the main loop of the multiplying warps, and between its
        # two forms what is put away once a tile.
        loop = code[code.index("QGMMA") : code.rindex("QGMMA")]
        assert len(re.findall(r"\b(LDL|STL)\b", loop)) <= 3, code.split("\n")[0]


def test_the_benchmarks_can_draw_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    bench = importlib.import_module("moe_prefill_fused")
    registry.load("moe_experts")
    for rung in bench.RUNGS:
        small = {**rung.sizes, "D": 64, "I": 64}
        case, drawn = bench.draw(small, 2, "mxfp4", seed=1, device="cpu", **rung.options)
        assert drawn["x_TD"].shape == (2, 64)
        assert not rung.counts or sum(rung.counts) == rung.tokens * case.sizes["K"]


# The order of work.


def items(num_items: int, grid: int) -> Iterator[tuple[int, int, int]]:
    """`item_of_round`: (block, round, item)."""
    for block in range(grid):
        taken = 0
        while True:
            item = taken * grid + (block + 37 * taken) % grid
            if item >= num_items:
                break
            yield block, taken, item
            taken += 1


@pytest.mark.parametrize(
    ("num_items", "grid"), [(1, 1), (5, 132), (1320, 132), (1441, 132), (99, 7)]
)
def test_every_item_is_taken_once(num_items: int, grid: int) -> None:
    taken = [item for _, _, item in items(num_items, grid)]
    assert sorted(taken) == list(range(num_items))


def test_long_and_short_tiles_in_turn_spread_over_the_blocks() -> None:
    # Two tiles an expert, one long and one short: without the rotation half of the blocks get long ones only.
    long = [0] * 132
    for block, _, item in items(128 * 23 * 2, 132):
        long[block] += item % 2 == 0
    assert max(long) - min(long) <= 2


def walked(counts: list[int], n: int, rows: int) -> list[tuple[int, int, int, int]]:
    """`locate` and `Walk`: (expert, first row, rows, first column) of every tile and pass."""
    runs_of_item = 1 if rows == 128 else 2
    wide = 256 if rows == 128 else 128
    columns = wide * runs_of_item
    band_size = 16 * 128 // rows
    runs = -(-n // columns)
    starts = [sum(counts[:e]) for e in range(len(counts) + 1)]
    tile_counts = [-(-c // rows) for c in counts]
    tiles = [sum(tile_counts[:e]) for e in range(len(counts) + 1)]
    owner = [e for e, t in enumerate(tile_counts) for _ in range(t)]
    found = []
    for item in range(tiles[-1] * runs):
        expert = owner[item // runs]
        local = item - tiles[expert] * runs
        band = local // (band_size * runs)
        band_tiles = min(tile_counts[expert] - band * band_size, band_size)
        local -= band * band_size * runs
        run = local // band_tiles
        row = starts[expert] + (band * band_size + local - run * band_tiles) * rows
        column = run * columns
        count = min(starts[expert + 1] - row, rows)
        found.append((expert, row, count, column))
        if rows == 256 and column + COLUMNS < n:
            found.append((expert, row, count, column + COLUMNS))
    return found


@pytest.mark.parametrize("rows", [256, 128])
@pytest.mark.parametrize("n", [5760, 128, 256, 384])
def test_slabs_and_pieces_cover_every_output_once(rows: int, n: int) -> None:
    counts = [0, 1, 64, 65, 128, 129, 192, 193, 256, 257, 0, 2600]
    covered = torch.zeros(sum(counts), -(-n // 128), dtype=torch.int32)
    for _, row, count, column in walked(counts, n, rows):
        for consumer in (0, 1):
            left = count - consumer * SLAB
            if left <= 0:
                continue
            if rows == 256:
                places = [
                    (consumer * SLAB + 128 * s, column) for s in range(2 if left > 128 else 1)
                ]
            else:
                places = [(consumer * SLAB, column)]
                if column + COLUMNS < n:
                    places.append((consumer * SLAB, column + COLUMNS))
            for first, at in places:
                assert first < count
                # Loaded: the filling warp asks for the slabs that have rows.
                assert first // SLAB < -(-count // SLAB)
                last = min(first + SLAB, count)
                covered[row + first : row + last, at // 128] += 1
    assert bool((covered == 1).all())


# The sort.


def sorted_rows(ids: list[int], experts: int) -> list[int]:
    """`sort_pairs_in_cluster`: runs of warps of blocks, counts before each, rows handed out in order."""
    blocks, warps = 8, 32
    rounds = -(-len(ids) // (blocks * warps * 32))
    runs = [
        [i for i in range((b * warps + w) * rounds * 32, (b * warps + w + 1) * rounds * 32) if i < len(ids)]
        for b in range(blocks)
        for w in range(warps)
    ]  # fmt: skip
    counts = torch.zeros(blocks, warps, experts, dtype=torch.int32)
    for at, run in enumerate(runs):
        for i in run:
            if ids[i] >= 0:
                counts[at // warps, at % warps, ids[i]] += 1
    before_warp = counts.cumsum(1) - counts
    of_block = counts.sum(1)
    before_block = of_block.cumsum(0) - of_block
    totals = of_block.sum(0)
    first = totals.cumsum(0) - totals
    rows = [-1] * len(ids)
    for at, run in enumerate(runs):
        block, warp = divmod(at, warps)
        following = (before_warp[block, warp] + before_block[block] + first).tolist()
        for i in run:
            if ids[i] >= 0:
                rows[i] = following[ids[i]]
                following[ids[i]] += 1
    return rows


@pytest.mark.parametrize("count", [1, 300, 9000])
def test_blocks_of_the_sort_keep_the_order_of_pairs(count: int) -> None:
    ids = torch.randint(-1, 5, (count,), generator=torch.Generator().manual_seed(2)).tolist()
    order = sorted((i for i in range(count) if ids[i] >= 0), key=lambda i: ids[i])
    wanted = [-1] * count
    for row, i in enumerate(order):
        wanted[i] = row
    assert sorted_rows(ids, 5) == wanted


# Expansion.


def swizzled(row: int, byte: int) -> int:
    """Where TMA puts a byte of a row of 128 bytes in 128-byte swizzle: address bits 4..6 xor bits 7..9."""
    address = row * 128 + byte
    return address ^ (address >> 7 & 7) << 4


def lanes() -> Iterator[tuple[int, int, int, int, int, int]]:
    """`expand`: (warp, lane, i, address of the codes, first and second address of the values)."""
    for warp in range(4):
        for lane in range(32):
            block, row = lane % 4, 32 * warp + lane // 4
            chunk0 = ((2 * block) ^ (lane // 4)) * 16
            for i in range(4):
                codes = (row + 8 * i) * 64 + block * 16
                values = row * BLOCK_K + i * 8 * BLOCK_K
                yield warp, lane, i, codes, values + chunk0, values + (chunk0 ^ 16)


def test_expanded_values_lie_where_the_copy_engine_would_put_them() -> None:
    seen = set()
    for _, _, _, codes, first, second in lanes():
        row, block = codes // 64, codes % 64 // 16
        for chunk, at in ((2 * block, first), (2 * block + 1, second)):
            for byte in range(16):
                assert at + byte == swizzled(row, chunk * 16 + byte)
                seen.add(at + byte)
    assert len(seen) == COLUMNS * BLOCK_K


def test_expansion_has_no_bank_conflicts() -> None:
    groups: dict[tuple[int, int, int], list[list[int]]] = {}
    for warp, lane, i, *addresses in lanes():
        # 16 bytes a lane: eight lanes are one pass over the 32 banks.
        parts = groups.setdefault((warp, lane // 8, i), [[], [], []])
        for part, address in zip(parts, addresses, strict=True):
            part.append(address // 16 % 8)
    assert all(sorted(part) == list(range(8)) for parts in groups.values() for part in parts)


def permuted(source: int, selector: int) -> int:
    """PRMT on eight bytes: a selector's top bit replicates the byte's sign."""
    out = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = source >> 8 * (nibble & 7) & 255
        if nibble & 8:
            byte = 255 if byte & 128 else 0
        out |= byte << 8 * i
    return out


def expanded_word(word: int, table: int) -> bytes:
    """`expand_word`: eight codes to eight bytes."""
    out = b""
    for half in (word & 0xFFFF, word >> 16):
        sign = permuted(0x8080808080808080, half) << 1 & 0x80808080
        out += (permuted(table, half & 0x7777) | sign).to_bytes(4, "little")
    return out


def lookup_tables() -> list[int]:
    """The table in shared memory: magnitudes times 2^(index - 40) as E4M3, eight bytes."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    tables = []
    for index in range(50):
        scaled = (magnitudes * 2.0 ** (index - 40)).clamp(-448, 448).to(torch.float8_e4m3fn)
        tables.append(int.from_bytes(bytes(scaled.view(torch.uint8).tolist()), "little"))
    return tables


@pytest.mark.parametrize("first_column", [0, 128])
def test_a_stage_expands_to_what_the_converter_makes(first_column: int) -> None:
    # 160 outputs: the second tile has 32 rows; 192 inputs: the second block of K is half.
    generator = torch.Generator().manual_seed(4)
    values = torch.randint(0, 256, (1, 160, 6, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(113, 127, (1, 160, 6), generator=generator, dtype=torch.uint8)
    matrix = FormattedTensor(format=MXFP4, values=values, scales=scales)
    tiles, tables = tile_exponents(matrix), lookup_tables()
    wanted = from_mxfp4(matrix).values[0].view(torch.uint8)
    for kb in range(2):
        packed = torch.zeros(COLUMNS, 64, dtype=torch.uint8)  # as TMA fills it: zeros outside
        part = values[0, first_column : first_column + 128].flatten(1)[:, kb * 64 : kb * 64 + 64]
        packed[: part.shape[0], : part.shape[1]] = part
        flat = packed.flatten()
        tile = int(tiles[0, first_column // 128, kb])
        stage = [0x7F] * (COLUMNS * BLOCK_K)
        for warp, lane, i, codes, at0, at1 in lanes():
            row, block = 32 * warp + lane // 4, lane % 4
            first = min(first_column + row, 159)
            exponent = int(scales[0, first + min(8 * i, 159 - first), min(4 * kb + block, 5)])
            table = tables[max(min(exponent - tile, 9), -40) + 40]
            words = [int.from_bytes(bytes(flat[codes + 4 * j : codes + 4 * j + 4].tolist()), "little")
                     for j in range(4)]  # fmt: skip
            out = b"".join(expanded_word(word, table) for word in words)
            stage[at0 : at0 + 16], stage[at1 : at1 + 16] = out[:16], out[16:]
        for row in range(COLUMNS):
            found = [stage[swizzled(row, byte)] for byte in range(BLOCK_K)]
            inside = (
                wanted[first_column + row, kb * 128 : kb * 128 + 128].tolist()
                if first_column + row < 160
                else []
            )
            # Outside: zeros of either sign add nothing.
            assert found[: len(inside)] == inside
            assert all(byte == 0 for byte in found[len(inside) :])


def test_shared_memory_of_every_shape_fits_and_is_aligned() -> None:
    launched = re.findall(
        r"return launch_product<(true|false), (\d), (\d)>",
        (FOLDER / "prefill_fused_sm90.cu").read_text(),
    )
    assert [g for g, _, _ in launched] == ["true", "false"]
    plans = [
        (gate_up, mxfp4, slabs, int(stages))
        for gate_up, of_256, of_128 in launched
        for mxfp4, slabs, stages in (
            ("true", 2, of_256),
            ("false", 2, of_256),
            ("false", 1, of_128),
        )
    ]
    for gate_up, mxfp4, slabs, stages in plans:
        runs = 2 // slabs
        stage = 128 * slabs * 128 + 128 * runs * 128
        aside = slabs * 640 + 128 + 4 * 128 * runs
        packed = 3 * (128 * 64 + 128) + 512 if mxfp4 == "true" else 0
        parked = 32 * 256 * 4 if gate_up == "true" and runs == 1 else 0
        assert stage % 1024 == 0
        assert aside % 128 == 0
        assert 1024 + stages * (stage + aside) + packed + parked + 512 <= 227 * 1024
