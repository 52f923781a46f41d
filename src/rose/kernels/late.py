"""Kernels that Triton compiles once serving has begun: each is named in the log, and all are counted.

Every running sequence waits for such a compilation, about half a second. Warm-up is to visit every kernel
(runtime/warm_up.py); what it missed is seen here. A kernel from Triton's cache on disk counts too: warm-up missed it,
be it for milliseconds only.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

from rose.utils.log import get_logger

_logger = get_logger(__name__)


class LateKernels:
    """Counts from `watch` on.

    HAZARD: Triton has one pair of hooks in a process, so the watch that began last counts.
    """

    def __init__(self) -> None:
        self.num = 0
        self._begin = 0.0

    def watch(self) -> None:
        """Count every kernel that is compiled from now on; without Triton there is nothing to count."""
        if importlib.util.find_spec("triton") is None:
            return
        from triton import knobs

        hooks: Any = knobs.runtime
        hooks.jit_cache_hook = self._before
        hooks.jit_post_compile_hook = self._after

    def _before(self, **_: Any) -> None:
        # What is not None or False here would keep Triton from compiling.
        self._begin = time.perf_counter()

    def _after(self, *, key: Any, fn: Any, **_: Any) -> None:
        self.num += 1
        _logger.warning(
            "compiled a kernel while serving, all sequences waited %.2f s: %s.%s for %s; please report it",
            time.perf_counter() - self._begin,
            fn.module,
            fn.name,
            key,
        )
