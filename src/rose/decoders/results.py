"""What was sampled on its way to the host: copied behind the step, waited for when the engine asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rose.protocol.event import TokenLogprobs
from rose.protocol.sampling_params import MAX_TOP_LOGPROBS
from rose.runtime.plan import StepResult
from rose.sampling.logprobs import Logprobs

MAX_IN_FLIGHT = 3
"""Buffers; two steps are in flight at most when planning overlaps, and one is being read."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step leaves on the device: int64 tokens [S], and log-probabilities in the extended flavour."""

    tokens_S: Tensor
    logprobs: Logprobs | None = None


@dataclass(slots=True)
class StepHandle:
    """A launched step: where its tokens will be."""

    step: int
    slots: list[int]
    num_top: Mapping[int, int]
    """Slot -> number of best tokens, for those that report log-probabilities."""
    tokens_S: Tensor
    logprobs: Logprobs | None
    event: torch.cuda.Event | None


class ResultRing:
    """Pinned buffers for tokens and log-probabilities, used in turn."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._tokens = [self._pinned(torch.int64, max_rows) for _ in range(MAX_IN_FLIGHT)]
        self._logprobs = [
            Logprobs(
                chosen_S=self._pinned(torch.float32, max_rows),
                top_SK=self._pinned(torch.float32, max_rows, MAX_TOP_LOGPROBS),
                top_ids_SK=self._pinned(torch.int64, max_rows, MAX_TOP_LOGPROBS),
            )
            for _ in range(MAX_IN_FLIGHT)
        ]
        self._events = [torch.cuda.Event() if self._is_cuda else None for _ in self._tokens]
        self._turn = 0

    def send(
        self, step: int, slots: list[int], sampled: Sampled | None, num_top: Mapping[int, int]
    ) -> StepHandle:
        """Enqueue the copy of the first rows, one per slot, to the host.

        HAZARD: a graph's next replay overwrites what was sampled; the copy is in the same stream, so it comes first.
        """
        self._turn = (self._turn + 1) % MAX_IN_FLIGHT
        count, event = len(slots), self._events[self._turn]
        buffer, logprobs = self._tokens[self._turn][:count], None
        if sampled is not None:
            buffer.copy_(sampled.tokens_S[:count], non_blocking=True)
        if sampled is not None and sampled.logprobs is not None and num_top:
            logprobs = _copy(sampled.logprobs, self._logprobs[self._turn], count)
        if event is not None:
            event.record()
        return StepHandle(step, slots, num_top, buffer, logprobs, event)

    def receive(self, handle: StepHandle) -> StepResult:
        """Wait until the step is done and return its tokens."""
        if handle.event is not None:
            handle.event.synchronize()
        tokens = handle.tokens_S.tolist()
        result = StepResult(
            step=handle.step,
            token_ids={slot: [t] for slot, t in zip(handle.slots, tokens, strict=True)},
        )
        if tokens and min(tokens) < 0:
            damaged = (slot for slot, t in zip(handle.slots, tokens, strict=True) if t < 0)
            result.damaged_slots = frozenset(damaged)
        if handle.logprobs is not None:
            result.logprobs.update(_by_slot(handle.slots, handle.num_top, handle.logprobs))
        return result

    def _pinned(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self._is_cuda)


def _copy(source: Logprobs, target: Logprobs, count: int) -> Logprobs:
    num_top = source.top_SK.shape[1]  # fewer than the buffer's where the vocabulary is small
    host = Logprobs(
        chosen_S=target.chosen_S[:count],
        top_SK=target.top_SK[:count, :num_top],
        top_ids_SK=target.top_ids_SK[:count, :num_top],
    )
    host.chosen_S.copy_(source.chosen_S[:count], non_blocking=True)
    host.top_SK.copy_(source.top_SK[:count], non_blocking=True)
    host.top_ids_SK.copy_(source.top_ids_SK[:count], non_blocking=True)
    return host


def _by_slot(
    slots: list[int], num_top: Mapping[int, int], logprobs: Logprobs
) -> dict[int, list[TokenLogprobs]]:
    # as lists first: single elements of a tensor cost a microsecond each
    chosen, top = logprobs.chosen_S.tolist(), logprobs.top_SK.tolist()
    top_ids = logprobs.top_ids_SK.tolist()
    return {
        slot: [TokenLogprobs(chosen[row], top_ids[row][:count], top[row][:count])]
        for row, slot in enumerate(slots)
        if (count := num_top.get(slot)) is not None
    }
