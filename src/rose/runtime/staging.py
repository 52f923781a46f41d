"""Host numbers on their way to the device: a ring of pinned buffers, one per step in flight."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class StagingRing:
    """Pinned int64 buffers used in turn.

    HAZARD: a copy from pinned memory runs when the stream gets there, not when it is called. A buffer is
    written again only after the event behind its last copy; with as many buffers as steps in flight plus
    one, that never waits.
    """

    def __init__(self, num_elements: int, device: torch.device, *, num_buffers: int = 3) -> None:
        self._is_cuda = device.type == "cuda"
        self._tensors = [
            torch.zeros(num_elements, dtype=torch.int64, pin_memory=self._is_cuda)
            for _ in range(num_buffers)
        ]
        self._arrays = [t.numpy() for t in self._tensors]
        self._events = [torch.cuda.Event() if self._is_cuda else None for _ in range(num_buffers)]
        self._turn = 0

    def next_array(self) -> np.ndarray:
        """Return the buffer to fill next, once the device has read what was in it."""
        self._turn = (self._turn + 1) % len(self._tensors)
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        return self._arrays[self._turn]

    def send(self, num_elements: int, target: Tensor) -> None:
        """Enqueue the copy of the filled part of the current buffer into `target`."""
        target[:num_elements].copy_(self._tensors[self._turn][:num_elements], non_blocking=True)
        event = self._events[self._turn]
        if event is not None:
            event.record()
