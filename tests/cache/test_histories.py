"""Random histories of a page table: what a hit holds is what was written, windows are whole and no larger, pages
are given back once. The model beside it knows what every page was last written with.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fakes.model import fake_config
from fakes.pages import check_pages
from rose.cache.keys import PageKeys
from rose.cache.layout import CacheLayout
from rose.cache.pool import PagePool
from rose.cache.table import PageTable
from rose.config.cache import CacheConfig

PAGE, WINDOW = 16, 40
LAYOUT = CacheLayout.of(
    fake_config(window_tokens=(WINDOW, None)), CacheConfig(page_tokens=PAGE), kv_element="float32"
)
NEVER_READ = None


class Holder:
    """A sequence as the scheduler drives it: tokens, how many are computed, and its pages."""

    def __init__(self, token_ids, salt):
        self.token_ids, self.salt = token_ids, salt
        self.keys = PageKeys(salt)
        self.pages = None
        self.num_computed = 0

    def beginning(self, column):
        """What a page of this column holds: everything that its keys and values depend on."""
        return self.salt, tuple(self.token_ids[: (column + 1) * PAGE])


class Histories(RuleBasedStateMachine):
    """Arrivals that begin alike, chunks, decoding, ends; with pools so small that idle pages are evicted."""

    def __init__(self):
        super().__init__()
        self.table = PageTable(LAYOUT, {"full": 14, "window": 12}, is_caching=self.is_caching)
        self.kinds = LAYOUT.kinds
        self.content = {kind.kind: {} for kind in self.kinds}
        self.running = []

    is_caching = True

    @rule(
        family=st.integers(0, 1),
        shared=st.integers(0, 90),
        own=st.integers(1, 20),
        salt=st.sampled_from(["", "", "other"]),
    )
    def arrive(self, family, shared, own, salt):
        """A prompt that shares `shared` tokens with others of its family."""
        tail = [1000 + len(self.running) * 50 + i for i in range(own)]
        new = Holder([family * 500 + i for i in range(shared)] + tail, salt)
        hit = self.table.find(new.keys, new.token_ids)
        assert hit.num_tokens == hit.num_columns * PAGE < len(new.token_ids)
        if not self.is_caching:
            assert hit.num_tokens == 0
        if not self.table.has_room(len(new.token_ids), hit, spare_pages=0):
            return
        new.pages = self.table.open(hit, len(new.token_ids))
        new.num_computed = hit.num_tokens
        self.running.append(new)
        self.check_readable(new)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), count=st.integers(1, 60))
    def compute(self, which, count):
        """The next chunk of a prompt, or decoded tokens."""
        s = self.running[which % len(self.running)]
        if s.num_computed >= s.pages.free_position:
            self.table.free_behind(s.pages, s.num_computed)
        end = min(s.num_computed + count, 130)
        end = self.table.reachable_tokens(s.pages, end)
        if end <= s.num_computed or self.table.grow(s.pages, end) is None:
            return
        s.token_ids += [2000 + i for i in range(len(s.token_ids), end)]
        self.check_readable(s)
        for i, kind in enumerate(self.kinds):
            for column in range(s.num_computed // PAGE, -(-end // PAGE)):
                page = s.pages.columns[i][column]
                assert self.table.pools[kind.kind]._holders[page] == 1, "a shared page is written"
                is_full = (column + 1) * PAGE <= end
                self.content[kind.kind][page] = s.beginning(column) if is_full else NEVER_READ
        s.num_computed = end
        self.table.register(s.pages, s.keys, s.token_ids, end)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9))
    def end(self, which):
        """A request ends, is aborted or preempted."""
        s = self.running.pop(which % len(self.running))
        self.table.close(s.pages)
        self.table.close(s.pages)
        assert all(not columns for columns in s.pages.columns)

    def check_readable(self, s):
        """All that the next position reads is held, and holds this sequence's tokens."""
        for i, kind in enumerate(self.kinds):
            columns = s.pages.columns[i]
            for column in range(kind.first_needed_column(s.num_computed), s.num_computed // PAGE):
                assert columns[column] >= 0, f"{kind.kind}: column {column} is read and gone"
                assert self.content[kind.kind][columns[column]] == s.beginning(column)

    @invariant()
    def pages_are_where_they_should_be(self):
        check_pages(self.table, self.running)

    @invariant()
    def windows_keep_what_they_need_and_no_more(self):
        """With the cache one page longer: what a hit at the end of the last full page would need."""
        for s in self.running:
            position = s.num_computed
            self.table.free_behind(s.pages, position)
            for i, kind in enumerate(self.kinds):
                if kind.window_tokens is None:
                    continue
                held = sum(page >= 0 for page in s.pages.columns[i])
                unused = (s.pages.capacity_tokens - position) // PAGE
                most = kind.most_pages(1 << 30, 1) + self.is_caching
                assert held - unused <= most

    def teardown(self):
        for s in self.running:
            self.table.close(s.pages)
        for pool in self.table.pools.values():
            assert pool.num_used == 0


class HistoriesWithoutCache(Histories):
    """The same with the prefix cache off."""

    is_caching = False


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHistoriesWithoutCache = HistoriesWithoutCache.TestCase
TestHistoriesWithoutCache.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None
)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Histories, HistoriesWithoutCache])
def test_thousands_of_histories(machine):
    run_state_machine_as_test(
        machine, settings=settings(max_examples=1000, stateful_step_count=60, deadline=None)
    )


@pytest.mark.parametrize(
    "break_it",
    [
        ("_evict", lambda self: self._free.append(self._idle.popitem(last=False)[0])),
        ("register", lambda self, page, key: self._pages.setdefault(b"0" * 16, page)),
        ("free", lambda self, pages, *, keep=False: None),
    ],
    ids=lambda b: b[0],
)
def test_a_broken_pool_is_found(monkeypatch, break_it):
    monkeypatch.setattr(PagePool, *break_it)
    quick = settings(
        max_examples=100,
        stateful_step_count=30,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # the smallest history that shows it is not asked for
    )
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run_state_machine_as_test(Histories, settings=quick)
