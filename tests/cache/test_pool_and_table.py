"""Pages are handed out once, freed once, and window layers keep only what a later token can see."""

from __future__ import annotations

import pytest

from rose.cache.layout import CacheLayout
from rose.cache.pool import PagePool
from rose.cache.table import PageTable
from rose.config.cache import CacheConfig
from rose.models.gpt_oss.config import published


def _table(num_full=100, num_window=100):
    layout = CacheLayout.of(published("20b"), CacheConfig(), kv_element="bf16")
    return PageTable(layout, {"full": num_full, "window": num_window})


def test_freed_pages_are_reused():
    pool = PagePool("full", 4)
    first = pool.allocate(4)
    assert sorted(first) == [0, 1, 2, 3]
    pool.free(first[1:3])
    assert set(pool.allocate(2)) == set(first[1:3])
    assert (pool.num_free, pool.num_used) == (0, 4)


def test_a_page_cannot_be_freed_twice():
    pool = PagePool("full", 4)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(pages)


def test_growing_names_each_new_column_once():
    table = _table()
    pages = table.open()
    first = table.grow(pages, 65)
    assert [c for c, _ in first["full"]] == [0, 1]
    assert table.grow(pages, 128) == {}
    assert [c for c, _ in table.grow(pages, 129)["window"]] == [2]


def test_growing_takes_all_or_nothing():
    table = _table(num_window=2)
    pages = table.open()
    assert table.grow(pages, 3 * 64) is None
    assert (table.pools["full"].num_used, table.pools["window"].num_used) == (0, 0)
    assert table.reachable_tokens(pages, 3 * 64) == 2 * 64


def test_window_pages_are_freed_as_soon_as_no_later_token_sees_them():
    table = _table()
    pages = table.open()
    table.grow(pages, 1000)
    table.free_behind(pages, 190)
    assert table.pools["window"].num_used == 16
    assert pages.free_position == 191
    table.free_behind(pages, 191)
    assert table.pools["window"].num_used == 15
    table.free_behind(pages, 1000)
    assert pages.columns[1][:14] == [-1] * 13 + pages.columns[1][13:14]
    assert table.pools["window"].num_used == 3
    assert table.pools["full"].num_used == 16


def test_closing_frees_everything_and_a_second_close_nothing():
    table = _table()
    pages = table.open()
    table.grow(pages, 1000)
    table.free_behind(pages, 500)
    table.close(pages)
    table.close(pages)
    assert (table.pools["full"].num_used, table.pools["window"].num_used) == (0, 0)


def test_room_counts_only_kinds_that_keep_all_pages():
    table = _table(num_full=10, num_window=3)
    assert table.max_tokens == 640
    assert table.has_room(640, spare_pages=0)
    assert not table.has_room(640, spare_pages=1)
