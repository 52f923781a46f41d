"""Programmatic dependent launch of Triton kernels: a kernel may start while the one before it drains.

A kernel that takes part waits (gdc_wait) before it reads or writes anything that another kernel writes or reads,
and lets its own dependents start only after that; so any kernel may come before and after it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

MAX_TOKENS = 64
"""Measured on an H200: a layer of the 20b gains 2 to 3 us of 60 to 128 at 1 and 8 tokens, 0 to 3 of 130 to 180 at
32; at 128 one run lost 30 of 220 to 270, the next gained 1 to 2 of 240 to 289."""


def pays(rows: Tensor) -> bool:
    """Tell whether kernels that work on `rows`, one per token, should be launched so."""
    return rows.is_cuda and rows.shape[0] <= MAX_TOKENS and _has_instructions()


def options(is_dependent: bool) -> dict[str, Any]:
    """Return the launch options of a kernel."""
    return {"launch_pdl": True} if is_dependent else {}


@cache
def _has_instructions() -> bool:
    from triton.runtime import driver

    target: Any = driver.active.get_current_target()
    return target.arch >= 90
