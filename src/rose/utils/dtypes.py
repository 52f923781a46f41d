"""Names of element types, and what they are in torch. Torch is imported only inside functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BITS_PER_ELEMENT = {
    "float64": 64,
    "float32": 32,
    "bf16": 16,
    "e4m3": 8,
    "e2m1": 4,
    "e8m0": 8,
    "int32": 32,
    "int64": 64,
}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`.

    Raises  ValueError with the known names.
    """
    import torch

    known = {
        "float64": torch.float64,
        "float32": torch.float32,
        "bf16": torch.bfloat16,
        "e4m3": torch.float8_e4m3fn,
        "int32": torch.int32,
        "int64": torch.int64,
    }
    if name not in known:
        raise ValueError(f"dtype {name!r} is not known; allowed: {', '.join(known)}")
    return known[name]
