"""Sampled tokens on their way to the host: copied behind the step, waited for when the engine asks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rose.runtime.plan import StepResult

MAX_IN_FLIGHT = 3
"""Buffers; two steps are in flight at most when planning overlaps, and one is being read."""


@dataclass(slots=True)
class StepHandle:
    """A launched step: where its tokens will be."""

    step: int
    slots: list[int]
    tokens_S: Tensor
    event: torch.cuda.Event | None


class ResultRing:
    """Pinned buffers for tokens, used in turn."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._buffers = [
            torch.zeros(max_rows, dtype=torch.int64, pin_memory=self._is_cuda)
            for _ in range(MAX_IN_FLIGHT)
        ]
        self._events = [torch.cuda.Event() if self._is_cuda else None for _ in self._buffers]
        self._turn = 0

    def send(self, step: int, slots: list[int], tokens_S: Tensor | None) -> StepHandle:
        """Enqueue the copy of the first tokens, one per slot, to the host.

        HAZARD: a graph's next replay overwrites tokens_S; the copy is in the same stream, so it comes first.
        """
        self._turn = (self._turn + 1) % MAX_IN_FLIGHT
        buffer, event = self._buffers[self._turn][: len(slots)], self._events[self._turn]
        if tokens_S is not None:
            buffer.copy_(tokens_S[: len(slots)], non_blocking=True)
        if event is not None:
            event.record()
        return StepHandle(step, slots, buffer, event)

    def receive(self, handle: StepHandle) -> StepResult:
        """Wait until the step is done and return its tokens."""
        if handle.event is not None:
            handle.event.synchronize()
        tokens = handle.tokens_S.tolist()
        return StepResult(
            step=handle.step,
            token_ids={slot: [t] for slot, t in zip(handle.slots, tokens, strict=True)},
        )
