"""What the runtime asks of a model, whatever its architecture."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rose.config.model import ModelConfig
from rose.kernels.registry import KernelRow
from rose.layers.context import ForwardContext


class CausalLM(Protocol):
    """A decoder: tokens in, hidden states out, logits on demand."""

    config: ModelConfig

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights on this rank's device, relayouts included."""
        ...

    def forward(self, token_ids_T: Tensor, context: ForwardContext) -> Tensor:
        """Return the final hidden states after the last norm: [T, D], or [M, D] where `context.sampled` names rows.

        Aliasing  writes the new KV of all tokens into its pages
        """
        ...

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Return float32 logits [S, V] of chosen rows."""
        ...

    def kernel_table(self) -> list[KernelRow]:
        """Return lines for the start-up table."""
        ...
