"""Ids of responses and their items; an item's id tells which response it is of, so that no index is needed."""

from __future__ import annotations

import re

RESPONSE_PREFIX = "resp_"
_ITEM = re.compile(r"[a-z]{2,3}_([0-9a-f]{32})_i?[0-9]{1,6}")


def item_id(prefix: str, response_id: str, place: int, *, is_input: bool = False) -> str:
    """Return the id of item number `place` of a response's output, or of its input."""
    mark = "i" if is_input else ""
    return f"{prefix}_{response_id.removeprefix(RESPONSE_PREFIX)}_{mark}{place}"


def response_of(item: str) -> str | None:
    """Return the id of the response that an item is of; None where the id is not one of ours."""
    found = _ITEM.fullmatch(item)
    return f"{RESPONSE_PREFIX}{found[1]}" if found else None
