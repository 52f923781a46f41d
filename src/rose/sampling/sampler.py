"""Logits -> tokens, by the bound `sample` operation. Knows no sequences and no host."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.config.engine import KernelsConfig
from rose.kernels.registry import BoundOperation, KernelRow, begin_compiling, bind
from rose.sampling.batch import SamplingBatch
from rose.utils.device import DeviceFacts


class Sampler:
    """Chooses one token per row of logits."""

    def __init__(self, operation: BoundOperation, vocab_size: int) -> None:
        self._operation = operation
        self._vocab_size = vocab_size

    @classmethod
    def build(
        cls, vocab_size: int, device: DeviceFacts, *, kernels: KernelsConfig | None = None
    ) -> Sampler:
        """Bind the operation for float32 logits of a vocabulary."""
        kernels = kernels or KernelsConfig()
        operation = bind(
            "sample",
            formats={"logits": "float32"},
            sizes={"V": vocab_size},
            device=device,
            only=kernels.only,
            check_calls=kernels.check_calls,
        )
        if device.kind == "cuda" and torch.cuda.is_available():
            begin_compiling(operation)
        return cls(operation, vocab_size)

    def kernel_table(self) -> list[KernelRow]:
        """Return lines for the start-up table."""
        return self._operation.rows()

    def sample(
        self,
        logits_SV: Tensor,
        batch: SamplingBatch,
        positions_S: Tensor,
        *,
        phase: str,
        is_filtered: bool,
    ) -> Tensor:
        """Return int64 tokens [S]; enqueues device work only.

        Shapes   logits_SV float32, V >= the vocabulary: columns past it are never chosen
                 positions_S int64: index of the new token in its sequence
        Aliasing columns of logits_SV past the vocabulary are overwritten
        """
        if logits_SV.shape[1] > self._vocab_size:
            logits_SV[:, self._vocab_size :] = float("-inf")
        tokens_S = torch.empty(logits_SV.shape[0], dtype=torch.int64, device=logits_SV.device)
        self._operation.select(phase, logits_SV.shape[0])(
            logits_SV,
            batch.temperature_S,
            batch.top_k_S,
            batch.top_p_S,
            batch.min_p_S,
            batch.seed_S,
            positions_S,
            is_filtered=is_filtered,
            tokens_S=tokens_S,
        )
        return tokens_S
