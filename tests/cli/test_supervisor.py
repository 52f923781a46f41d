"""How long a supervisor waits before it starts an engine again; tests/e2e/test_failure.py shows that it does."""

from __future__ import annotations

from rose.cli.supervisor import LONGEST_PAUSE_SECONDS, pause_before


def test_the_first_restart_is_at_once_and_pauses_are_bounded():
    assert [pause_before(n) for n in range(1, 9)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert pause_before(1000) == LONGEST_PAUSE_SECONDS
