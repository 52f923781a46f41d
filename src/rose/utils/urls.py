"""Addresses of servers as people write them."""

from __future__ import annotations


def server_root(url: str) -> str:
    """Return where the routes of a server begin; `/v1` is part of the routes here, of the address in many clients."""
    return url.rstrip("/").removesuffix("/v1")
