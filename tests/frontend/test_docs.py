"""docs/api.md names everything that the code decides on."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.frontend import parsing
from rose.frontend.errors import KINDS
from rose.frontend.metrics import Metrics
from rose.server.scripted import ScriptLine

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"


def _metric_names():
    return [family.name for family in Metrics().registry.collect()]


NAMES = {
    "ignored": sorted(parsing.IGNORED),
    "chat": sorted(parsing.UNSUPPORTED_CHAT),
    "completion": sorted(parsing.UNSUPPORTED_COMPLETION),
    "script": ["text", *ScriptLine.__struct_fields__],
    "metrics": _metric_names(),
    # 409 and 499 never reach a client: ids are ours, and nobody reads the answer of a closed connection.
    "errors": sorted(
        kind.name or code
        for code, kind in KINDS.items()
        if code not in ("duplicate_request_id", "client_disconnected")
    ),
}


@pytest.mark.parametrize("kind", NAMES)
def test_the_api_page_names_everything(kind):
    text = DOCUMENT.read_text()
    assert [name for name in NAMES[kind] if name not in text] == []
