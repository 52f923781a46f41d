"""Sampling parameters as device tensors: one row per slot, gathered for the rows of a step.

A sequence's parameters are written once, when it takes its slot; decode steps only read them, by slot, so
that a captured graph needs nothing from the host. Knows nothing of logits.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from rose.protocol.sampling_params import SamplingParams

INTS = 2
"""Whole numbers per slot: seed, top_k."""
FLOATS = 3
"""Fractions per slot: temperature, top_p, min_p."""
GREEDY_BELOW = 2.0**-64
"""Temperatures below it are 0 on the device: dividing logits by them would pass float32, and the noise they add
is far below the distance of any two different logits."""
LEAST_TOP_P = 2.0**-126
"""Smallest top_p on the device, the smallest normal float32: 0 would leave no token at all; this leaves the best."""


@dataclass(slots=True, kw_only=True)
class SamplingBatch:
    """Parameters of S rows, as the `sample` contract takes them."""

    temperature_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    seed_S: Tensor

    @classmethod
    def of(cls, seed_S: Tensor, top_k_S: Tensor, floats_FS: Tensor) -> SamplingBatch:
        """Name the gathered rows of a SamplingTable."""
        temperature_S, top_p_S, min_p_S = floats_FS
        return cls(
            temperature_S=temperature_S,
            top_k_S=top_k_S,
            top_p_S=top_p_S,
            min_p_S=min_p_S,
            seed_S=seed_S,
        )


class SamplingTable:
    """Parameters of all slots.

    Shapes   R slots, the last for padding rows;  I = 2, F = 3
             ints_IR int64: seed, top_k;  floats_FR float32: temperature, top_p, min_p
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.ints_IR = torch.zeros(INTS, num_rows, dtype=torch.int64, device=device)
        self.floats_FR = torch.zeros(FLOATS, num_rows, dtype=torch.float32, device=device)
        self.floats_FR[1] = 1.0

    def write(self, rows_N: Tensor, packed_5N: Tensor) -> None:
        """Set rows from numbers packed by `pack` (int64, one column per row)."""
        self.ints_IR.index_copy_(1, rows_N, packed_5N[:INTS])
        # contiguous: `view` to another type needs the halves of each number side by side
        bits = packed_5N[INTS:].to(torch.int32).contiguous()
        self.floats_FR.index_copy_(1, rows_N, bits.view(torch.float32))

    def gather(self, slots_S: Tensor) -> SamplingBatch:
        """Return the parameters of the given slots; enqueues device work only."""
        seed_S, top_k_S = self.ints_IR.index_select(1, slots_S)
        floats_FS = self.floats_FR.index_select(1, slots_S)
        return SamplingBatch.of(seed_S, top_k_S.to(torch.int32), floats_FS)


def pack(sampling: SamplingParams) -> list[int]:
    """Return a slot's parameters as five integers: seed, top_k, and the bits of three float32."""
    assert sampling.seed is not None, "the engine fills in the seed before a sequence runs"
    temperature = sampling.temperature if sampling.temperature >= GREEDY_BELOW else 0.0
    floats = (temperature, max(sampling.top_p, LEAST_TOP_P), sampling.min_p)
    # top_k past int32 keeps all, as any number past the vocabulary does
    top_k = min(sampling.top_k, 2**31 - 1)
    return [sampling.seed, top_k, *struct.unpack("<3i", struct.pack("<3f", *floats))]


@dataclass(frozen=True, slots=True)
class SampleFlavour:
    """Which passes over the logits the rows of a step need; one decode graph is captured for each."""

    is_filtered: bool = False
    """Some row may leave tokens out, so the one-pass sampler does not do."""
    is_extended: bool = False
    """Some row changes logits or reports log-probabilities."""
    is_masked: bool = False
    """Some row may not sample every token."""


class SlotFlavours:
    """Which slots need more than the cheapest flavour."""

    def __init__(self) -> None:
        self._filtered: set[int] = set()
        self._extended: set[int] = set()
        self.adjusted: set[int] = set()
        """Slots whose rows of the AdjustmentTable are not neutral."""
        self.masked: set[int] = set()
        """Slots whose rows of the MaskTable leave tokens out."""
        self.logprobs: dict[int, int] = {}
        """Slot -> how many of the best tokens it reports."""

    def take(self, slot: int, sampling: SamplingParams) -> None:
        """Note what the sequence that takes a slot needs."""
        for slots, is_in in (
            (self._filtered, is_filtered(sampling)),
            (self.adjusted, sampling.changes_logits),
            (self._extended, sampling.changes_logits or sampling.logprobs is not None),
        ):
            change = slots.add if is_in else slots.discard
            change(slot)
        if sampling.logprobs is not None:
            self.logprobs[slot] = sampling.logprobs
        else:
            self.logprobs.pop(slot, None)

    def of(self, slots: list[int]) -> SampleFlavour:
        """Return what a step with these slots needs."""
        # empty sets first: a look at each slot costs 5 us at 128 of them
        return SampleFlavour(
            bool(self._filtered) and not self._filtered.isdisjoint(slots),
            bool(self._extended) and not self._extended.isdisjoint(slots),
            bool(self.masked) and not self.masked.isdisjoint(slots),
        )


def is_filtered(sampling: SamplingParams) -> bool:
    """Tell whether any token can be left out, so that the one-pass sampler does not do."""
    return sampling.temperature >= GREEDY_BELOW and (
        sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    )
