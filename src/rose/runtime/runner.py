"""One forward pass: a plan in, logits of the rows that sample out. Knows no sampling and no decoding rule."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.cache.layout import CacheLayout
from rose.models.base import CausalLM
from rose.runtime.inputs import DeviceTables, StepInputs
from rose.runtime.plan import StepPlan
from rose.utils.dtypes import torch_dtype


class ModelRunner:
    """A model, its KV pages and the device tables of the sequences that run."""

    def __init__(self, model: CausalLM, tables: DeviceTables, kv_pages: list[Tensor]) -> None:
        self.model = model
        self.tables = tables
        self.kv_pages = kv_pages
        """Per layer [pages, 2, G, L, D]; replaced once, when the memory plan is made."""

    @torch.inference_mode()
    def forward(
        self, plan: StepPlan, *, max_length: int | None = None
    ) -> tuple[StepInputs, Tensor | None]:
        """Send a step and enqueue it eagerly.

        Units    max_length: what decode launches rely on; None: the plan's own
        Returns  its inputs, and float32 logits [S, V] of the rows that sample; None where no row does
        """
        max_length = plan.max_length if max_length is None else max_length
        if plan.prefill:
            inputs = self.tables.mixed_inputs(plan, self.kv_pages, max_length=max_length)
            return inputs, self._logits(inputs)
        self.tables.send_decode(plan, len(plan.decode))
        return self.forward_decode(len(plan.decode), max_length)

    @torch.inference_mode()
    def forward_decode(self, num_rows: int, max_length: int) -> tuple[StepInputs, Tensor]:
        """Enqueue the decode step that was sent last, from device memory alone; graph-safe."""
        inputs = self.tables.decode_inputs(num_rows, max_length, self.kv_pages)
        logits_SV = self._logits(inputs)
        assert logits_SV is not None
        return inputs, logits_SV

    def _logits(self, inputs: StepInputs) -> Tensor | None:
        hidden_SD = self.model.forward(inputs.token_ids_T, inputs.context)
        return self.model.logits(hidden_SD) if len(hidden_SD) else None


def allocate_kv(
    layout: CacheLayout, num_pages: dict[str, int], device: torch.device
) -> list[Tensor]:
    """Return zeroed KV pages per layer; the layers of a kind share one allocation.

    Zeroed, because masked positions of a page may be read and NaN times zero is NaN.
    """
    by_layer: dict[int, Tensor] = {}
    for kind in layout.kinds:
        shape = (len(kind.layers), *kind.shape(num_pages[kind.kind]))
        memory = torch.zeros(shape, dtype=torch_dtype(kind.element), device=device)
        by_layer.update(zip(kind.layers, memory, strict=True))
    return [by_layer[i] for i in range(len(by_layer))]
