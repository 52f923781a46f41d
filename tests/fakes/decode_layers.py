"""Stand-ins for a kernel of decode_layers: registered beside the others, or called by the CUDA one's wrapper."""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable

import pytest

from rose.kernels import registry
from rose.kernels.decode_layers.contract import MAX_SEQUENCES
from rose.kernels.registry import Band, Implementation

registry.load("decode_layers")
cuda_impl = importlib.import_module("rose.kernels.decode_layers.cuda_impl")
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
            "rows": (1, MAX_SEQUENCES),
            **changes,
        }
    )
    known = registry._implementations["decode_layers"]
    others = {name: i for name, i in known.items() if i.band < Band.SPECIALISED}
    monkeypatch.setitem(registry._implementations, "decode_layers", {**others, NAME: fused})
    return rows


def put_on_cpu(
    monkeypatch: pytest.MonkeyPatch,
    *,
    layers: Callable[..., int],
    workspace_bytes: Callable[[], int],
) -> None:
    """Let the wrapper of the CUDA kernel call these; each as the C function of its name, results and all."""

    def checked(function: Callable[..., int]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            assert function(*arguments) == 0

        return call

    monkeypatch.setattr(cuda_impl.LAUNCHERS, "call_layers", checked(layers))
    monkeypatch.setattr(cuda_impl.LAUNCHERS, "call_workspace_bytes", workspace_bytes)
    monkeypatch.setattr(cuda_impl, "_stream", lambda _tensor: 0)


def put_library_on_cpu(monkeypatch: pytest.MonkeyPatch, host: ctypes.CDLL) -> None:
    """The same with a library compiled for this machine."""
    types = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}
    host.launch_decode_layers.argtypes = [types[t] for t in cuda_impl.LAYERS_TYPES]
    put_on_cpu(
        monkeypatch,
        layers=host.launch_decode_layers,
        workspace_bytes=host.decode_layers_workspace_bytes,
    )
    monkeypatch.setattr(cuda_impl.LAUNCHERS, "call_qkv_at", host.decode_layers_qkv_at)
    monkeypatch.setattr(cuda_impl.LAUNCHERS, "call_attended_at", host.decode_layers_attended_at)
