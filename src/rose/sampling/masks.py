"""Which tokens a slot may sample, as packed bits on the device. Knows no grammar and no sequence.

A slot's row is written before the step that needs it; steps read rows by slot, so that they can be captured.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rose.config.engine import KernelsConfig
from rose.kernels.registry import KernelRow, bind
from rose.utils.device import DeviceFacts
from rose.utils.math import ceil_div

BITS = 32
"""Per word of a mask."""
_ALL = -1
"""A word with every bit set."""


class MaskTable:
    """Masks of all slots.

    Shapes   R slots, the last for padding rows; W = ceil(V / 32)
             masks_RW int32: bit i % 32 of word i // 32 allows token i (a vocabulary of 201,088 and 257 slots: 6.5 MB)
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: DeviceFacts,
        *,
        kernels: KernelsConfig | None = None,
    ) -> None:
        kernels = kernels or KernelsConfig()
        self.vocab_size = vocab_size
        self._device = torch.device(device.kind)
        shape = (num_rows, ceil_div(vocab_size, BITS))
        self.masks_RW = torch.full(shape, _ALL, dtype=torch.int32, device=self._device)
        self._operation = bind(
            "mask_logits",
            formats={"logits": "float32"},
            sizes={"V": vocab_size},
            device=device,
            only=kernels.only,
            check_calls=kernels.check_calls,
        )

    def kernel_table(self) -> list[KernelRow]:
        """Return lines for the start-up table."""
        return self._operation.rows()

    def warm_up(self) -> None:
        """Compile what `apply` needs, so that no request with a grammar has to wait for it."""
        slots_S = torch.zeros(1, dtype=torch.int64, device=self._device)
        logits_SV = torch.zeros(1, self.vocab_size, dtype=torch.float32, device=self._device)
        for phase in ("prefill", "decode"):
            self.apply(logits_SV, slots_S, phase=phase)

    def write(self, masks: Mapping[int, bytes | None]) -> None:
        """Set rows; None allows all. Enqueues device work only, one copy for all rows."""
        slots = torch.tensor(list(masks), dtype=torch.int64)
        rows_NW = torch.zeros(len(masks), self.masks_RW.shape[1], dtype=torch.int32)
        for row_W, mask in zip(rows_NW, masks.values(), strict=True):
            if mask is None:
                row_W.fill_(_ALL)
                continue
            words = torch.frombuffer(bytearray(mask), dtype=torch.int32)[: len(row_W)]
            row_W[: len(words)] = words
        if self._device.type == "cuda":
            slots, rows_NW = slots.pin_memory(), rows_NW.pin_memory()
        self.masks_RW.index_copy_(
            0,
            slots.to(self._device, non_blocking=True),
            rows_NW.to(self._device, non_blocking=True),
        )

    def apply(self, logits_SV: Tensor, slots_S: Tensor, *, phase: str) -> None:
        """Set the logits of tokens that may not be sampled to -inf; graph-safe.

        Shapes   logits_SV float32, V of the table or more columns; those past the table's stay
        Aliasing logits_SV is changed in place
        """
        self._operation.select(phase, len(slots_S))(
            slots_S, self.masks_RW, logits_SV=logits_SV[:, : self.vocab_size]
        )


def mask_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the bytes of a MaskTable."""
    return num_rows * 4 * ceil_div(vocab_size, BITS)
