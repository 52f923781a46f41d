"""Whether the pages of a table are where they should be: each held as often as sequences hold it, or free, or idle."""

from __future__ import annotations

from collections import Counter


def check_pages(table, sequences):
    """Count the holders of every page of every kind, and the pages that nobody holds."""
    for i, kind in enumerate(table.layout.kinds):
        pool = table.pools[kind.kind]
        held = Counter(p for s in sequences for p in s.pages.columns[i] if p >= 0)
        counted = {page: n for page, n in enumerate(pool._holders) if n}
        assert counted == dict(held), f"{kind.kind}: pages leak or are lost"
        idle = [*pool._idle, *pool._kept]
        unused = sorted([*idle, *pool._free])
        assert unused == sorted(set(range(pool.num_pages)) - set(held)), (
            f"{kind.kind}: unused pages"
        )
        assert pool.num_used == len(held)
        named = {page for page, key in enumerate(pool._keys) if key is not None}
        assert set(pool._pages.values()) == named, f"{kind.kind}: a key finds a page that lost it"
        assert set(idle) <= named
        assert not named & set(pool._free)


def is_clean(table):
    """Whether nobody holds a page."""
    check_pages(table, [])
    return all(pool.num_used == 0 for pool in table.pools.values())


def check_written(table, sequence, entry):
    """No page that the entry writes is held by anyone else."""
    size = table.layout.page_tokens
    first, end = entry.start_position, entry.start_position + entry.num_tokens
    for i, kind in enumerate(table.layout.kinds):
        for column in range(first // size, -(-end // size)):
            page = sequence.pages.columns[i][column]
            assert table.pools[kind.kind]._holders[page] == 1, f"{kind.kind}: a shared page"
