"""What the prefix cache finds: whole pages, with their window, of the same tokens and salt, until they are evicted."""

from __future__ import annotations

import pytest

from fakes.pages import check_pages, is_clean
from rose.cache.keys import KEY_BYTES, PageKeys
from rose.cache.layout import CacheLayout
from rose.cache.pool import PagePool
from rose.cache.table import PageTable
from rose.config.cache import CacheConfig
from rose.engine.sequence import Sequence
from rose.models.gpt_oss.config import published
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams

PAGE = 64


def _table(num_full=100, num_window=100, *, is_caching=True):
    layout = CacheLayout.of(published("20b"), CacheConfig(), kv_element="bf16")
    return PageTable(layout, {"full": num_full, "window": num_window}, is_caching=is_caching)


def _tokens(count, first=0):
    return [first + i for i in range(count)]


def _run(table, tokens, salt="", *, computed=None):
    """Let a sequence compute its tokens and end; return how many it found."""
    keys = PageKeys(salt)
    hit = table.find(keys, tokens)
    pages = table.open(hit, len(tokens))
    assert table.grow(pages, len(tokens)) is not None
    end = len(tokens) if computed is None else computed
    table.register(pages, keys, tokens, end)
    table.free_behind(pages, end)
    table.close(pages)
    return hit.num_tokens


def _find(table, tokens, salt=""):
    return table.find(PageKeys(salt), tokens).num_tokens


def test_keys_depend_on_all_tokens_before_and_on_the_salt():
    tokens = _tokens(4 * PAGE)
    keys = PageKeys("").up_to(4, tokens, PAGE)
    assert {len(k) for k in keys} == {KEY_BYTES}
    assert len(set(keys)) == 4
    other = PageKeys("").up_to(4, [9999, *tokens[1:]], PAGE)
    assert not set(keys) & set(other)
    late = PageKeys("").up_to(4, [*tokens[:-1], 9999], PAGE)
    assert late[:3] == keys[:3]
    assert late[3] != keys[3]
    assert not set(keys) & set(PageKeys("tenant").up_to(4, tokens, PAGE))


def test_keys_computed_in_parts_are_those_computed_at_once():
    tokens, parts = _tokens(5 * PAGE), PageKeys("s")
    parts.up_to(2, tokens[: 2 * PAGE], PAGE)
    assert parts.up_to(5, tokens, PAGE) == PageKeys("s").up_to(5, tokens, PAGE)


@pytest.mark.parametrize(
    ("shared", "length", "found"),
    [(63, 200, 0), (64, 200, 64), (200, 500, 192), (640, 700, 640), (640, 640, 576), (641, 641, 640)],
)  # fmt: skip
def test_a_hit_is_whole_pages_and_leaves_the_last_token(shared, length, found):
    table = _table()
    _run(table, _tokens(shared))
    prompt = _tokens(shared) + _tokens(length - shared, first=5000)
    assert _find(table, prompt) == found
    assert _find(table, prompt, "another tenant") == 0


def test_nothing_is_found_with_the_cache_off():
    table = _table(is_caching=False)
    _run(table, _tokens(500))
    assert _find(table, _tokens(500)) == 0
    assert table.num_idle_pages == 0


def test_only_what_was_computed_is_found():
    table = _table()
    _run(table, _tokens(640), computed=300)
    assert _find(table, _tokens(640)) == 256


def test_a_hit_holds_all_full_pages_and_the_last_window_alone():
    table = _table()
    _run(table, _tokens(640))
    pages = table.open(table.find(PageKeys(""), _tokens(700)), 700)
    assert [sum(p >= 0 for p in columns) for columns in pages.columns] == [10, 2]
    assert pages.columns[1][8:] == [p for p in pages.columns[1] if p >= 0]
    table.grow(pages, 700)
    updates = table.held(pages)
    assert [c for c, _ in updates["full"]] == list(range(11))
    assert [c for c, _ in updates["window"]] == [8, 9, 10]
    table.close(pages)
    assert is_clean(table)


def test_a_hit_ends_where_its_window_is_whole():
    table = _table(num_full=100, num_window=12)
    _run(table, _tokens(640))
    assert (table.pools["window"].num_idle, table.pools["full"].num_idle) == (10, 10)
    # Takes the 2 free window pages and evicts columns 0 to 3, which left first.
    other = table.open()
    table.grow(other, 6 * PAGE)
    assert _find(table, _tokens(700)) == 640
    assert _find(table, _tokens(4 * PAGE + 5)) == 0, "column 3 is gone, 2 too"
    assert _find(table, _tokens(5 * PAGE + 5)) == 0, (
        "5 pages of full attention, but column 3 is gone"
    )
    assert _find(table, _tokens(6 * PAGE + 5)) == 6 * PAGE, "columns 4 and 5 are there"
    table.close(other)


def test_where_a_hit_is_likely_to_end_the_window_stays_longest():
    """A prompt of 640 tokens leaves the window of the same prompt again (576) and of its extension (640)."""
    table = _table(num_full=200, num_window=20)
    _run(table, _tokens(640))
    for i in range(3):
        pages = table.open()
        # Nobody has these tokens: they take every page but the kept ones.
        table.grow(pages, (20 - 3) * PAGE)
        table.close(pages)
        assert _find(table, _tokens(640)) == 576, i
        assert _find(table, _tokens(700)) == 640, i


def test_a_beginning_that_two_prompts_shared_is_kept_for_the_third():
    table = _table(num_full=200, num_window=24)
    shared = _tokens(512)
    _run(table, shared + _tokens(300, first=5000))
    pages = table.open()
    table.grow(pages, (24 - 3) * PAGE)
    table.close(pages)
    # Its pages of full attention are all there, its window is not: the second prompt computes it again ...
    assert _run(table, shared + _tokens(300, first=6000)) == 0
    pages = table.open()
    table.grow(pages, (24 - 3 - 3 - 2) * PAGE)
    table.close(pages)
    # ... and it stays, since two prompts have parted there.
    assert _find(table, shared + _tokens(300, first=7000)) == 512


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning():
    table = _table(num_full=12, num_window=100)
    for first in (0, 1000, 2000):
        _run(table, _tokens(4 * PAGE, first))
    assert _run(table, _tokens(4 * PAGE, 0)) == 3 * PAGE
    pages = table.open()
    table.grow(pages, 2 * PAGE)
    assert _find(table, _tokens(5 * PAGE, 1000)) == 2 * PAGE
    assert _find(table, _tokens(4 * PAGE, 2000)) == 3 * PAGE
    # The second run of the first prompt took its own last page, which is always computed anew; then two more went.
    assert table.num_evictions == 3
    table.close(pages)


def test_held_pages_are_never_evicted():
    table = _table(num_full=10, num_window=100)
    _run(table, _tokens(5 * PAGE))
    first = table.open(table.find(PageKeys(""), _tokens(5 * PAGE)), 5 * PAGE)
    second = table.open()
    table.grow(second, 6 * PAGE)
    assert table.grow(first, 5 * PAGE) is None
    table.close(second)
    assert table.grow(first, 5 * PAGE) is not None
    table.close(first)


def test_room_counts_pages_that_a_hit_shares_once():
    table = _table(num_full=10, num_window=100)
    tokens = _tokens(8 * PAGE)
    _run(table, tokens)
    hit = table.find(PageKeys(""), tokens)
    # 7 of the 8 pages are idle: the hit takes them out of the 10 free ones, the eighth is new.
    assert table.has_room(8 * PAGE, hit, spare_pages=2)
    assert not table.has_room(8 * PAGE, hit, spare_pages=3)
    pages = table.open(hit, 8 * PAGE)
    again = table.find(PageKeys(""), tokens)
    assert table.has_room(8 * PAGE, again, spare_pages=2)
    assert not table.has_room(8 * PAGE, spare_pages=0)
    table.close(pages)


def test_two_that_computed_the_same_page_leave_one_to_find():
    table = _table()
    tokens, sequences = _tokens(3 * PAGE), []
    for name in "ab":
        sequence = Sequence(
            Request(request_id=name, prompt_token_ids=tokens, max_tokens=1), SamplingParams(seed=0)
        )
        sequence.pages = table.open(None, len(tokens))
        table.grow(sequence.pages, len(tokens))
        sequences.append(sequence)
    for sequence in sequences:
        table.register(sequence.pages, sequence.keys, tokens, len(tokens))
    check_pages(table, sequences)
    for sequence in sequences:
        table.close(sequence.pages)
    assert is_clean(table)
    assert (table.num_idle_pages, table.pools["full"].num_free) == (3, 100)


def test_the_window_of_the_last_full_page_is_kept_while_the_next_one_fills():
    table = _table()
    pages = table.open()
    table.grow(pages, 300)
    assert pages.free_position == 192
    table.free_behind(pages, 255)
    # A hit of 192 tokens looks at 65..191: columns 1 and 2.
    assert pages.columns[1][0] == -1
    assert pages.columns[1][1] >= 0
    assert pages.free_position == 256
    table.close(pages)


def test_the_first_to_be_evicted_are_pages_that_are_not_kept():
    pool = PagePool("window", 3)
    pages = pool.allocate(3)
    for page in pages:
        pool.register(page, bytes([page]))
    pool.free(pages[:1], keep=True)
    pool.free(pages[1:])
    assert pool.allocate(1) == [pages[1]]
    assert pool.find(bytes([pages[1]])) is None
    pool.keep(pages[2])
    assert pool.allocate(1) == [pages[0]]


def test_an_unseen_prompt_is_not_hashed_to_be_looked_up():
    table, tokens = _table(), _tokens(50 * PAGE)
    _run(table, _tokens(10 * PAGE))
    keys = PageKeys("")
    assert table.find(keys, [9999, *tokens[1:]]).num_columns == 0
    assert len(keys.up_to(0, tokens, PAGE)) <= 4
    assert _find(table, tokens) == 10 * PAGE
