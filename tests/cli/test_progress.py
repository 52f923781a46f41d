"""What a person sees of a start: one writer at a time on the terminal."""

from __future__ import annotations

import pytest

from rose.cli import serve as cli_serve
from rose.cli.progress import Announcer
from rose.frontend.config import FrontendConfig


@pytest.mark.parametrize("is_moving", [True, False])
def test_a_line_moves_on_a_terminal_only_where_nobody_else_writes(monkeypatch, is_moving):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    announcer = Announcer(is_moving=is_moving)
    try:
        assert (announcer._spinner is not None) is is_moving
    finally:
        announcer.close()


@pytest.mark.parametrize(("level", "logs"), [("INFO", True), ("DEBUG", True), ("WARNING", False)])
def test_an_engine_that_logs_its_start_needs_no_moving_line(level, logs):
    launch = cli_serve.model_launch(None, {}, FrontendConfig(), log_level=level)
    assert launch.logs_progress is logs


def test_only_errors_are_worded_anew(capsys):
    announcer = Announcer(worded=str.upper)
    announcer("listening", "http://a")
    announcer("failed", "change x")
    assert capsys.readouterr().err == "listening on http://a\nerror: CHANGE X\n"
