"""The CUDA kernel's own index arithmetic, run on the host: nothing is left out, nothing done twice."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose.kernels.attention_prefill import contract

HERE = Path(__file__).parent
SOURCES = Path(contract.__file__).parent
ROWS = 64
FIELDS = ("sequence", "group", "first_row", "num_rows", "length", "last_piece", "position")
FIELDS += ("low", "high")
PIECE_FIELDS = ("head", "first_row", "num_rows", "position", "length", "low", "high")
PIECE_FIELDS += ("item_low", "item_high")
BATCHES = {
    "one_token": [(1, 1)],
    "square": [(1000, 1000)],
    "chunk": [(200, 5000)],
    "ragged": [(1, 1), (63, 63), (192, 500), (0, 7), (193, 193), (64, 8192), (1, 300), (650, 651)],
}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    built = tmp_path_factory.mktemp("items") / "items.so"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", f"-I{SOURCES}", "-o", str(built)]
    subprocess.run([*command, str(HERE / "items_host.cpp")], check=True)
    return ctypes.CDLL(str(built))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def list_items(host, chunks, groups, cut, num_blocks):
    """Return each block's items as dictionaries.

    `cut`: warpgroups, keys of a tile, window, kv heads of a section, heads of a kv head.
    """
    starts = np.cumsum([0, *(new for new, _ in chunks)], dtype=np.int32)
    lengths = np.array([length for _, length in chunks], dtype=np.int32)
    words, width = np.array(cut, dtype=np.int32), len(PIECE_FIELDS)
    blocks = []
    for block in range(num_blocks):
        out = np.zeros((8192, len(FIELDS) + cut[0] * width), dtype=np.int32)
        batch = (len(chunks), pointer(starts), pointer(lengths), groups)
        count = host.list_items(*batch, pointer(words), block, num_blocks, pointer(out))
        blocks.append([])
        for row in out[:count].tolist():
            item: dict[str, Any] = dict(zip(FIELDS, row[: len(FIELDS)], strict=True))
            pieces = [row[len(FIELDS) + wg * width :][:width] for wg in range(cut[0])]
            item["pieces"] = [dict(zip(PIECE_FIELDS, piece, strict=True)) for piece in pieces]
            blocks[-1].append(item)
    return blocks


SHAPES = pytest.mark.parametrize(
    ("warpgroups", "tile_keys"), [(2, 128), (3, 128), (3, 64), (2, 192)]
)


@SHAPES
@pytest.mark.parametrize("name", BATCHES)
def test_every_row_of_every_head_is_done_once(host, name, warpgroups, tile_keys):
    chunks, heads = BATCHES[name], 8
    for per_group, divided, num_blocks in itertools.product((1, 2, 4, 8), (1, 2), (1, 5, 132)):
        groups = heads // per_group
        section = max(1, groups // divided)
        cut = (warpgroups, tile_keys, 1 << 30, section, per_group)
        blocks = list_items(host, chunks, groups, cut, num_blocks)
        done = np.zeros((sum(new for new, _ in chunks), heads), dtype=int)
        for item in itertools.chain(*blocks):
            assert item["pieces"][0]["num_rows"] > 0
            for piece in item["pieces"]:
                assert 0 <= piece["num_rows"] <= ROWS
                assert piece["head"] // per_group == item["group"]
                rows = slice(piece["first_row"], piece["first_row"] + piece["num_rows"])
                done[rows, piece["head"]] += 1
        assert (done == 1).all()


@SHAPES
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("window", [1, 50, 128, 1000, 1 << 30])
def test_tiles_are_those_that_some_row_sees(host, name, window, warpgroups, tile_keys):
    chunks = BATCHES[name]
    starts = np.cumsum([0, *(new for new, _ in chunks)])
    (items,) = list_items(host, chunks, 1, (warpgroups, tile_keys, window, 1, 2), 1)
    for item in items:
        new, length = chunks[item["sequence"]]
        assert item["length"] == length
        lows, highs, firsts = [], [], []
        for piece in item["pieces"]:
            assert piece["length"] == length
            assert (piece["item_low"], piece["item_high"]) == (item["low"], item["high"])
            if piece["num_rows"] == 0:
                assert piece["high"] < piece["low"] == item["low"]
                continue
            row = piece["first_row"] - starts[item["sequence"]]
            first, last = length - new + row, length - new + row + piece["num_rows"] - 1
            assert 0 <= row < row + piece["num_rows"] <= new
            assert piece["position"] == first
            first_seen = max(0, int(first) - window + 1)
            assert (piece["low"], piece["high"]) == (first_seen // tile_keys, last // tile_keys)
            lows.append(piece["low"])
            highs.append(piece["high"])
            firsts.append(first)
        # The producer loads exactly what the warpgroups together take.
        assert (item["low"], item["high"]) == (min(lows), max(highs))
        assert item["position"] == min(firsts)


@pytest.mark.parametrize(("chunks", "over"), [([(8192, 8192)], 1.03), ([(1024, 1024)] * 8, 1.25)])
def test_blocks_get_like_amounts_of_work(host, chunks, over) -> None:
    """A block takes as long as its items' tiles; beside it, what masks and the last round cost over the exact work."""
    blocks = list_items(host, chunks, 8, (3, 128, 1 << 30, 8, 8), 132)
    tiles = [sum(i["high"] - i["low"] + 1 for i in items) for items in blocks]
    exact = 64 * sum(n * (n + 1) // 2 for n, _ in chunks) / (3 * ROWS * 128 * 132)
    assert max(tiles) <= over * exact


def test_pieces_of_an_item_see_like_numbers_of_tiles(host) -> None:
    (items,) = list_items(host, [(1000, 5000)], 8, (3, 64, 1 << 30, 8, 8), 1)
    for item in items:
        held = [piece for piece in item["pieces"] if piece["num_rows"]]
        assert max(p["high"] for p in held) - min(p["high"] for p in held) <= 1


def test_heads_of_a_section_run_together(host) -> None:
    (items,) = list_items(host, [(2000, 2000)], 4, (3, 128, 1 << 30, 2, 2), 1)
    sections = [i["group"] // 2 for i in items]
    assert sections == sorted(sections)
    highs = [i["high"] for i in items[: len(items) // 2]]
    assert highs == sorted(highs, reverse=True)


WINDOW_FIELDS = ("sequence", "group", "first_row", "begin", "end", "first_key", "length", "seen")


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("window", [1, 50, 128, 129])
def test_window_items_do_every_row_once_and_hold_what_it_sees(host, name, window) -> None:
    chunks, groups = BATCHES[name], 3
    starts = np.cumsum([0, *(new for new, _ in chunks)], dtype=np.int32)
    lengths = np.array([length for _, length in chunks], dtype=np.int32)
    out = np.zeros((4096, 8), dtype=np.int32)
    count = host.list_window_items(
        len(chunks), pointer(starts), pointer(lengths), groups, window, pointer(out)
    )
    done = np.zeros((starts[-1], groups), dtype=int)
    for row in out[:count].tolist():
        item = dict(zip(WINDOW_FIELDS, row, strict=True))
        new, length = chunks[item["sequence"]]
        assert item["length"] == length
        assert item["first_key"] % 64 == 0
        rows = np.arange(item["begin"], item["end"])
        assert len(rows) > 0
        done[item["first_row"] + rows, item["group"]] += 1
        positions = item["first_row"] + rows - starts[item["sequence"]] + length - new
        # As the kernel has it: row r is at position first_key + 128 + r.
        assert (positions == item["first_key"] + 128 + rows).all()
        lowest = np.maximum(0, positions - window + 1)
        assert item["seen"] == lowest[0]
        assert (lowest >= item["first_key"]).all()
        assert (positions < item["first_key"] + 192).all()
    assert (done == 1).all()


def find_maps(host, keys: list[tuple[int, int, int, int]]) -> tuple[int, list[int]]:
    rows, found = np.array(keys, dtype=np.uint64), np.zeros(len(keys), dtype=np.int64)
    encoded = host.find_maps(len(keys), pointer(rows), pointer(found))
    return encoded, found.tolist()


def test_kept_map_is_that_of_the_whole_key(host) -> None:
    """A tensor of another shape may lie where one lay before."""
    keys = [(1 << 20, 64, 100, 128), (1 << 20, 0, 100, 128), (1 << 20, 64, 101, 128)]
    keys += [(1 << 20, 64, 100, 256), (1 << 20, 64, 100, 128)]
    encoded, found = find_maps(host, keys)
    assert found == [sum(key) for key in keys]
    assert encoded == len(keys)


def test_layers_keep_their_maps_from_step_to_step(host) -> None:
    """48 tensors some MB apart take turns; a few may share a slot."""
    keys = [((7 << 32) + (i * 33 << 20), 8, 4096, 128) for i in range(48)]
    encoded, found = find_maps(host, keys * 10)
    assert found == [sum(key) for key in keys] * 10
    assert encoded < len(keys) * 5


def test_failed_encoding_is_not_kept(host) -> None:
    good, bad = (1 << 20, 8, 5, 128), (1 << 20, 9, 5, 128)
    assert find_maps(host, [good, bad, bad, good]) == (4, [sum(good), -1, -1, sum(good)])
