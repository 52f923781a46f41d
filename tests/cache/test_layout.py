"""Bytes and columns of the KV cache, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from rose.cache.layout import CacheLayout
from rose.config.cache import CacheConfig
from rose.models.gpt_oss.config import published


def _kinds(size, **kwargs):
    layout = CacheLayout.of(published(size), CacheConfig(), kv_element="bf16", **kwargs)
    return {k.kind: k for k in layout.kinds}, layout


def test_bytes_of_the_published_models():
    # Per token and layer: 2 (k, v) x 8 heads x 64 x 2 bytes = 2048; 20b has 12 layers of each kind.
    kinds, _ = _kinds("20b")
    assert kinds["full"].page_bytes == 12 * 64 * 2048
    assert kinds["window"].page_bytes == 12 * 64 * 2048
    assert _kinds("120b")[0]["full"].page_bytes == 18 * 64 * 2048


def test_ranks_share_the_heads():
    assert _kinds("20b", tp=8)[0]["full"].shape(5) == (5, 2, 1, 64, 64)


def test_layers_alternate_between_the_kinds():
    _, layout = _kinds("20b")
    kinds = {k.kind: k.layers for k in layout.kinds}
    assert kinds["window"][:3] == (0, 2, 4)
    assert kinds["full"][:3] == (1, 3, 5)


@pytest.mark.parametrize(
    ("position", "column"), [(0, 0), (127, 0), (190, 0), (191, 1), (254, 1), (255, 2), (1000, 13)]
)
def test_first_needed_column_of_a_window_of_128(position, column):
    # A query at 191 sees 64..191: column 0 (0..63) is dead.
    kinds, _ = _kinds("20b")
    assert kinds["window"].first_needed_column(position) == column
    assert kinds["full"].first_needed_column(position) == 0


def test_most_pages_of_a_window_do_not_grow_with_the_length():
    kinds, _ = _kinds("20b")
    assert kinds["window"].most_pages(100_000, 1) == 3
    assert kinds["window"].most_pages(100_000, 4096) == 67
    assert kinds["full"].most_pages(100_000, 4096) == 1563
