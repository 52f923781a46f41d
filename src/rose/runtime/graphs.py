"""CUDA graphs of decode steps: captured once per bucket of rows, then replayed. Knows no model.

What is captured reads the step from device tables and writes its tokens to a fixed tensor, so a replay needs
no host data but the slots sent before it. All graphs share one memory pool: only one runs at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rose.sampling.batch import SampleFlavour
from rose.utils.errors import ConfigError
from rose.utils.log import get_logger

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Rows of the captured graphs. Above 16 the steps keep the rows wasted on padding under a third."""

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph was captured for."""

    num_rows: int
    max_length: int
    flavour: SampleFlavour


class DecodeGraphs:
    """Captures and replays `step(num_rows, max_length, flavour) -> tensors of the result`."""

    def __init__(
        self,
        step: Callable[[int, int, SampleFlavour], Any],
        *,
        max_rows: int,
        max_lengths: tuple[int, ...],
        batch_sizes: tuple[int, ...] = BATCH_SIZES,
    ) -> None:
        self._step = step
        self.batch_sizes = [b for b in batch_sizes if b < max_rows] + [max_rows]
        self.max_lengths = sorted(max_lengths)
        """Buckets of the length that a launch may rely on; the last covers the context."""
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool = None

    def bucket(self, num_rows: int) -> int:
        """Return the rows of the graph that serves a batch; the rest is padding."""
        return self.batch_sizes[bisect_left(self.batch_sizes, num_rows)]

    def length_bucket(self, max_length: int) -> int:
        """Return the bound on lengths of the graph that serves a batch."""
        return self.max_lengths[bisect_left(self.max_lengths, max_length)]

    def ensure(
        self, num_rows: int, max_length: int, flavour: SampleFlavour, prepare: Callable[[int], None]
    ) -> None:
        """Capture the graph of a step where there is none yet; before the step is sent.

        Extended flavours are captured here, on first use: few servers ever need them.

        Units  prepare(num_rows) sends a step of padding only, which the warm-up runs read
        """
        key = GraphKey(num_rows, self.length_bucket(max_length), flavour)
        if key not in self._graphs:
            _logger.info("capturing a graph while serving: %s", key)
            self._warm_and_capture(key, prepare)

    def replay(self, num_rows: int, max_length: int, flavour: SampleFlavour) -> Any:
        """Enqueue the step that was sent for `num_rows` (a bucket); `ensure` comes first.

        Returns  what the step returned, for the bucket's rows; overwritten by the next replay of this graph
        """
        graph, result = self._graphs[GraphKey(num_rows, self.length_bucket(max_length), flavour)]
        graph.replay()
        return result

    def capture_all(self, prepare: Callable[[int], None], report: Callable[[str], None]) -> None:
        """Capture every bucket of the common flavours, the largest first so that the smaller ones fit into its memory.

        Units  prepare(num_rows) sends a step of padding only, which the warm-up runs read
        """
        keys = [
            GraphKey(rows, length, SampleFlavour(is_filtered))
            for rows in reversed(self.batch_sizes)
            for length in reversed(self.max_lengths)
            for is_filtered in (False, True)
        ]
        for i, key in enumerate(keys):
            report(f"capturing decode graph {i + 1} of {len(keys)}")
            self._warm_and_capture(key, prepare)

    def _warm_and_capture(self, key: GraphKey, prepare: Callable[[int], None]) -> None:
        prepare(key.num_rows)
        # Compiles kernels and fills their caches, neither of which a capture allows.
        self._step(key.num_rows, key.max_length, key.flavour)
        self._graphs[key] = self._capture(key)

    def _capture(self, key: GraphKey) -> tuple[torch.cuda.CUDAGraph, Any]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                result = self._step(key.num_rows, key.max_length, key.flavour)
        except RuntimeError as error:
            raise ConfigError(
                f"a decode step of {key.num_rows} rows cannot be captured in a CUDA graph: {error}; every bound "
                "kernel must be free of host synchronisation (a `torch` implementation often is not, see the "
                "start-up table); set use_graphs to false or change kernels.only"
            ) from error
        if self._pool is None:
            self._pool = graph.pool()
        return graph, result
