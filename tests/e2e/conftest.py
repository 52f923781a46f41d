"""Real servers in processes of their own, over real HTTP."""

from __future__ import annotations

import pytest

from fakes.servers import scripted_server


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """Return a function that starts a scripted server for a `with` block."""

    def start(lines, *options):
        return scripted_server(tmp_path_factory.mktemp("scripted"), lines, *options)

    return start
