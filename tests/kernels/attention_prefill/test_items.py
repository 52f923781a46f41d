"""The CUDA kernel's own index arithmetic, run on the host: nothing is left out, nothing done twice."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rose.kernels.attention_prefill import contract

HERE = Path(__file__).parent
SOURCES = Path(contract.__file__).parent
ROWS = 64
FIELDS = ("sequence", "head", "first_row", "num_rows", "position", "length", "low", "high")
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


def list_items(host, chunks, heads, section, window, item_rows, tile_keys, num_blocks):
    """Return each block's items as dictionaries."""
    starts = np.cumsum([0, *(new for new, _ in chunks)], dtype=np.int32)
    lengths = np.array([length for _, length in chunks], dtype=np.int32)
    blocks = []
    for block in range(num_blocks):
        out = np.zeros((4096, 8), dtype=np.int32)
        sizes = (heads, section, window, item_rows, tile_keys, block, num_blocks)
        count = host.list_items(
            len(chunks), pointer(starts), pointer(lengths), *sizes, pointer(out)
        )
        blocks.append([dict(zip(FIELDS, row.tolist(), strict=True)) for row in out[:count]])
    return blocks


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("warpgroups", "tile_keys"), [(2, 128), (3, 128), (3, 64), (2, 192)])
def test_every_row_of_every_head_is_done_once(host, name, warpgroups, tile_keys) -> None:
    chunks, heads = BATCHES[name], 4
    for section, num_blocks in itertools.product((2, 4), (1, 5, 132)):
        blocks = list_items(
            host, chunks, heads, section, 1 << 30, warpgroups * ROWS, tile_keys, num_blocks
        )
        done = np.zeros((sum(new for new, _ in chunks), heads), dtype=int)
        for item in itertools.chain(*blocks):
            assert 0 < item["num_rows"] <= warpgroups * ROWS
            done[item["first_row"] : item["first_row"] + item["num_rows"], item["head"]] += 1
        assert (done == 1).all()


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("window", [1, 50, 128, 1000, 1 << 30])
@pytest.mark.parametrize(("warpgroups", "tile_keys"), [(2, 128), (3, 128), (3, 64), (2, 192)])
def test_tiles_are_those_that_some_row_sees(host, name, window, warpgroups, tile_keys) -> None:
    chunks = BATCHES[name]
    starts = np.cumsum([0, *(new for new, _ in chunks)])
    (items,) = list_items(host, chunks, 1, 1, window, warpgroups * ROWS, tile_keys, 1)
    for item in items:
        new, length = chunks[item["sequence"]]
        assert item["length"] == length
        row = item["first_row"] - starts[item["sequence"]]
        assert item["position"] == length - new + row
        lows, highs = [], []
        for wg in range(warpgroups):
            out = np.zeros(3, dtype=np.int32)
            packed = np.array([item[f] for f in FIELDS], dtype=np.int32)
            host.reach_of(pointer(packed), wg, window, tile_keys, pointer(out))
            positions = (
                length - new + row + np.arange(wg * ROWS, min((wg + 1) * ROWS, item["num_rows"]))
            )
            if len(positions) == 0:
                assert out[2] < out[1]
                continue
            first_seen = max(0, int(positions[0]) - window + 1)
            assert out.tolist() == [
                positions[0],
                first_seen // tile_keys,
                positions[-1] // tile_keys,
            ]
            lows.append(out[1])
            highs.append(out[2])
        # The producer loads exactly what the warpgroups together take.
        assert (item["low"], item["high"]) == (min(lows), max(highs))


def test_blocks_get_like_amounts_of_work(host) -> None:
    blocks = list_items(host, [(8192, 8192)], 64, 64, 1 << 30, 192, 128, 132)
    tiles = [sum(i["high"] - i["low"] + 1 for i in items) for items in blocks]
    assert max(tiles) <= 1.03 * sum(tiles) / len(tiles)


def test_heads_of_a_section_run_together(host) -> None:
    (items,) = list_items(host, [(2000, 2000)], 8, 4, 1 << 30, 192, 128, 1)
    heads = [i["head"] // 4 for i in items]
    assert heads == sorted(heads)
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
