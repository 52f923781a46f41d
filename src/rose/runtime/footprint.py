"""What a model takes of a device besides KV, told before it is loaded: no weights, no memory, no device needed.

The model is built on torch's meta device with the kernels that the real one gets, and the largest step is run dry
(`kernels.dry`): tensors have shapes and no memory, and their bytes are counted while they live.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from rose.cache.layout import CacheLayout
from rose.config.engine import EngineConfig
from rose.config.model import ModelConfig
from rose.layers.context import ForwardContext, KindContext, SampledRows
from rose.models.base import CausalLM
from rose.models.registry import ModelEntry
from rose.runtime.inputs import table_bytes
from rose.runtime.memory import MemoryUse, graph_bytes
from rose.utils.device import DeviceFacts
from rose.utils.dtypes import torch_dtype
from rose.utils.math import ceil_div

LOGITS_COPIES = {"cuda": 5, "cpu": 16}
"""Float32 copies of the logits that head and sampler hold at once where every row filters and has penalties; on a CPU
the sampler sorts with 64-bit numbers."""


def footprint(
    entry: ModelEntry,
    model_config: ModelConfig,
    config: EngineConfig,
    device: DeviceFacts,
    *,
    context_tokens: int,
) -> MemoryUse:
    """Return what weights, relayouts, the largest step, graphs and tables take.

    Units    config is resolved; context_tokens: the longest sequence that may come
    Raises   InvarianceError where the batch-invariant mode was asked for and kernels for it are missing
    """
    layout = CacheLayout.of(
        model_config, config.cache, kv_element=config.quant.kv_element, tp=config.parallel.tp
    )
    model = entry.dry_model(model_config, config, device, context_tokens=context_tokens)
    scheduler, vocab_size = config.scheduler, model_config.vocab_size
    angles = 4 * context_tokens * model_config.head_dim  # the dry model has none
    return MemoryUse(
        weights=model.weight_bytes,
        workspace=_workspace(model, layout, config, context_tokens),
        graphs=graph_bytes(scheduler.max_sequences, vocab_size) if config.use_graphs else 0,
        tables=angles
        + table_bytes(
            layout,
            num_slots=scheduler.max_sequences,
            context_tokens=context_tokens,
            vocab_size=vocab_size,
        ),
    )


def _workspace(
    model: CausalLM, layout: CacheLayout, config: EngineConfig, context_tokens: int
) -> int:
    """Return the peak of a step of `max_step_tokens` in which `max_sequences` rows sample."""
    num_tokens = config.scheduler.step_tokens
    num_rows = min(config.scheduler.max_sequences, num_tokens)
    context = _blank_context(layout, num_tokens, context_tokens)
    context.sampled = SampledRows(rows_M=_integers(num_rows), sequences_M=_integers(num_rows))
    peak = PeakBytes()
    copies = LOGITS_COPIES.get(config.device, LOGITS_COPIES["cpu"])
    with peak:
        logits_SV = model.logits(model.forward(_integers(num_tokens), context))
        more = logits_SV.new_empty(copies - 1, *logits_SV.shape)
        del more
    return peak.most


def _blank_context(layout: CacheLayout, num_tokens: int, context_tokens: int) -> ForwardContext:
    columns = ceil_div(context_tokens, layout.page_tokens)
    pages = {
        layer: torch.empty(kind.shape(1), dtype=torch_dtype(kind.element), device="meta")
        for kind in layout.kinds
        for layer in kind.layers
    }
    return ForwardContext(
        phase="prefill",
        num_tokens=num_tokens,
        num_decode=0,
        max_query_tokens=num_tokens,
        max_length=context_tokens,
        positions_T=_integers(num_tokens),
        lengths_S=_integers(1),
        query_starts_N1=_integers(2),
        kinds={
            kind.kind: KindContext(
                page_table_SP=torch.empty(1, columns, dtype=torch.int32, device="meta"),
                slots_T=_integers(num_tokens),
            )
            for kind in layout.kinds
        },
        kv_pages=[pages[layer] for layer in sorted(pages)],
    )


def _integers(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device="meta")


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of tensors made while it is active, as long as they live; `most` is the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live = 0
        self._seen = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if _is_tensor(t)}
        for tensor in tree_leaves(result):
            if _is_tensor(tensor) and id(tensor.untyped_storage()) not in known:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        num_bytes = storage.nbytes()
        self._seen[storage] = num_bytes
        self._live += num_bytes
        self.most = max(self.most, self._live)
        weakref.finalize(storage, self._forget, num_bytes)

    def _forget(self, num_bytes: int) -> None:
        self._live -= num_bytes


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
