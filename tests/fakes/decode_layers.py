"""Stand-ins for a kernel of decode_layers: registered beside the others while a test runs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from rose.kernels import registry
from rose.kernels.registry import Band, Implementation

NAME = "fused"


def register(
    monkeypatch: pytest.MonkeyPatch,
    *,
    function: Callable[..., None] | None = None,
    **changes: object,
) -> list[int]:
    """Add an implementation above the blocks' own; return the rows of each of its calls.

    `function`: what computes, the reference unless given
    """
    found = registry.implementations("decode_layers")
    plain = next(i for i in found if i.name == "reference")
    compute, rows = function or plain.function, []

    @functools.wraps(compute)  # registration and checks read its signature
    def recorded(*args: object, **kwargs: object) -> None:
        rows.append(len(args[0]))
        compute(*args, **kwargs)

    fused = Implementation(
        **{
            "operation": "decode_layers",
            "name": NAME,
            "function": recorded,
            "band": Band.SPECIALISED,
            "phases": frozenset({"decode"}),
            "rows": (1, 2),
            **changes,
        }
    )
    known = registry._implementations["decode_layers"]
    others = {name: i for name, i in known.items() if i.band < Band.SPECIALISED}
    monkeypatch.setitem(registry._implementations, "decode_layers", {**others, NAME: fused})
    return rows
