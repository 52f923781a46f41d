"""What changes logits before they are sampled, by slot: token counts, penalties, and numbers to add to single logits.

Rows of a slot are written when a sequence takes it; decode steps read them and count the new token, on the device,
so that they can be captured. A slot that changes nothing holds neutral numbers, which leave every bit of its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rose.protocol.sampling_params import MAX_BANNED, MAX_BIASES, SamplingParams

IN_PROMPT = 1 << 30
"""Bit of a count that says the token stands in the prompt; the bits below count it in the output."""
ALWAYS = 2**62
"""Position that no sequence reaches."""
_NEUTRAL = (1.0, 0.0, 0.0)
_WIDTH = MAX_BIASES + MAX_BANNED


@dataclass(slots=True, kw_only=True)
class Adjustments:
    """What `TRANSFORMS` need of S rows.

    Shapes   S rows, V vocabulary, E places for single logits
             counts_SV int32: output count, plus IN_PROMPT
             repetition_S, frequency_S, presence_S float32
             ids_SE int64, values_SE float32: added to the logit of that id at positions below until_SE (int64)
             positions_S int64: index of the token to sample in its sequence
    """

    counts_SV: Tensor
    repetition_S: Tensor
    frequency_S: Tensor
    presence_S: Tensor
    ids_SE: Tensor
    values_SE: Tensor
    until_SE: Tensor
    positions_S: Tensor


class AdjustmentTable:
    """Adjustments of all slots.

    Shapes   R slots, the last for padding rows
             counts_RV int32 (a vocabulary of 201,088 and 257 slots: 207 MB);  penalties_3R float32;
             ids_RE, until_RE int64;  values_RE float32
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self.counts_RV = _zeroed_counts(num_rows, vocab_size, device)
        self.penalties_3R = torch.zeros(3, num_rows, dtype=torch.float32, device=device)
        self.penalties_3R[0] = 1.0
        self.ids_RE = torch.zeros(num_rows, _WIDTH, dtype=torch.int64, device=device)
        self.values_RE = torch.zeros(num_rows, _WIDTH, dtype=torch.float32, device=device)
        self.until_RE = torch.zeros(num_rows, _WIDTH, dtype=torch.int64, device=device)

    def write(
        self,
        slot: int,
        sampling: SamplingParams,
        *,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        stop_ids: Sequence[int],
    ) -> None:
        """Set the rows of a slot; enqueues device work only.

        Units    output_ids: tokens sampled already, where a preempted sequence starts again
        """
        penalties = (
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        self.penalties_3R[:, slot].copy_(self._send(penalties, torch.float32), non_blocking=True)
        if sampling.counts_tokens:
            counts_V = self.counts_RV[slot]
            counts_V.zero_()
            counts_V.index_fill_(0, self._send(prompt_ids, torch.int64), IN_PROMPT)
            if output_ids:
                output_N = self._send(output_ids, torch.int64)
                counts_V.index_add_(0, output_N, torch.ones_like(output_N, dtype=torch.int32))
        first_free = len(prompt_ids) + sampling.min_tokens
        added = [(i, bias, ALWAYS) for i, bias in sampling.logit_bias.items()]
        if sampling.min_tokens:
            added += [(i, float("-inf"), first_free) for i in stop_ids]
        self._write_added(slot, added)

    def reset(self, slot: int) -> None:
        """Make the rows of a slot neutral."""
        self.penalties_3R[:, slot].copy_(self._send(_NEUTRAL, torch.float32), non_blocking=True)
        self.values_RE[slot].zero_()

    def gather(self, slots_S: Tensor, positions_S: Tensor) -> Adjustments:
        """Return the adjustments of the given slots; graph-safe."""
        repetition_S, frequency_S, presence_S = self.penalties_3R.index_select(1, slots_S)
        return Adjustments(
            counts_SV=self.counts_RV.index_select(0, slots_S),
            repetition_S=repetition_S,
            frequency_S=frequency_S,
            presence_S=presence_S,
            ids_SE=self.ids_RE.index_select(0, slots_S),
            values_SE=self.values_RE.index_select(0, slots_S),
            until_SE=self.until_RE.index_select(0, slots_S),
            positions_S=positions_S,
        )

    def count(self, slots_S: Tensor, tokens_S: Tensor) -> None:
        """Count one more token of each slot's output; graph-safe."""
        # padding rows, whose logits may be NaN, need not have a token of the vocabulary
        cells_S = slots_S * self.vocab_size + tokens_S.clamp(0, self.vocab_size - 1)
        # several padding rows share a slot, so this must add up rather than write
        ones_S = torch.ones_like(cells_S, dtype=torch.int32)
        self.counts_RV.view(-1).scatter_add_(0, cells_S, ones_S)

    def _write_added(self, slot: int, added: list[tuple[int, float, int]]) -> None:
        self.values_RE[slot].zero_()
        if not added:
            return
        ids, values, until = zip(*added, strict=True)
        count = len(added)
        self.ids_RE[slot, :count] = self._send(ids, torch.int64)
        self.values_RE[slot, :count] = self._send(values, torch.float32)
        self.until_RE[slot, :count] = self._send(until, torch.int64)

    def _send(self, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Return numbers as a device tensor without waiting; the allocator keeps pinned memory until it is read."""
        tensor = torch.tensor(numbers, dtype=dtype)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def adjustment_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the bytes of an AdjustmentTable."""
    return num_rows * (4 * vocab_size + 3 * 4 + _WIDTH * (8 + 4 + 8))


def _zeroed_counts(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        # numpy leaves pages that are never written to the system; torch writes zeros to all 200 MB
        return torch.from_numpy(np.zeros((num_rows, vocab_size), dtype=np.int32))
    return torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
