"""From a model to a runner with its KV cache: measure the largest step, plan the memory, allocate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rose.cache.layout import CacheLayout
from rose.config.engine import EngineConfig
from rose.kernels.ahead import AheadKernels
from rose.kernels.late import LateKernels
from rose.models.base import CausalLM
from rose.runtime.ahead import begin_ahead
from rose.runtime.inputs import DeviceTables
from rose.runtime.limits import context_limit, require_one_device
from rose.runtime.memory import MemoryPlan, MemoryUse, graph_bytes, plan_memory
from rose.runtime.memory_words import is_as_planned, outcome, table
from rose.runtime.runner import ModelRunner, allocate_kv
from rose.runtime.warm_up import prompt_step
from rose.utils.device import DeviceFacts
from rose.utils.log import get_logger
from rose.utils.math import ceil_div

_logger = get_logger(__name__)

Report = Callable[[str], None]
"""Told in words what is being done, while the engine is not ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """Everything below the decoder."""

    config: EngineConfig
    """Resolved."""
    device: DeviceFacts
    runner: ModelRunner
    layout: CacheLayout
    memory: MemoryPlan
    context_tokens: int
    """Limit of the model and the configuration, whatever KV can hold."""
    measured: MemoryUse
    """What was found after loading; on a CPU weights alone."""
    ahead_kernels: AheadKernels
    """What was compiled before its first launch."""
    late_kernels: LateKernels
    """What is compiled once the decoder is warm."""
    memory_lines: tuple[str, ...]
    """The plan in words; where it was printed before loading, how it came out."""


def assemble(
    model: CausalLM,
    config: EngineConfig,
    device: DeviceFacts,
    report: Report,
    *,
    planned: MemoryPlan | None = None,
) -> Assembly:
    """Build runner, device tables and KV cache for a model whose parameters are on the device.

    Units    config is resolved; planned: what was decided before the model was loaded, held against what is
             measured now; None: the plan is made now
    Raises   ConfigError where parallel sizes, context or memory do not allow it
    """
    layout = CacheLayout.of(
        model.config, config.cache, kv_element=config.quant.kv_element, tp=config.parallel.tp
    )
    require_one_device(config.parallel)
    ahead = begin_ahead(model.config, config, device)
    context_tokens = context_limit(config, model.config)
    tables = DeviceTables(
        layout,
        num_slots=config.scheduler.max_sequences,
        context_tokens=context_tokens,
        max_step_tokens=config.scheduler.step_tokens,
        vocab_size=model.config.vocab_size,
        device=device,
        kernels=config.kernels,
    )
    runner = ModelRunner(model, tables, [])
    use = MemoryUse(weights=model.weight_bytes)
    if device.kind == "cuda":
        ahead.wait(report)
        report("measuring the memory of the largest step")
        use = _measure(runner, layout, config, context_tokens)
    if planned is not None and is_as_planned(planned.use, use):
        memory, lines = planned, [outcome(planned.use, use)]
    else:
        # A plan that was too small is made again from what was measured: refused if that does not fit.
        memory = plan_memory(
            layout=layout,
            cache=config.cache,
            scheduler=config.scheduler,
            use=use,
            device_bytes=device.memory_bytes,
            context_tokens=context_tokens,
            is_context_asked=config.context_tokens is not None,
        )
        lines = list(table(memory, layout, config, device, context_tokens=context_tokens))
        if planned is not None:
            _logger.warning("%s; planned again, as follows", outcome(planned.use, use))
    runner.kv_pages = allocate_kv(layout, memory.num_pages, tables.device)
    return Assembly(
        config=config,
        device=device,
        runner=runner,
        layout=layout,
        memory=memory,
        context_tokens=context_tokens,
        measured=use,
        ahead_kernels=ahead,
        late_kernels=LateKernels(),
        memory_lines=tuple(lines),
    )


def _measure(
    runner: ModelRunner, layout: CacheLayout, config: EngineConfig, context_tokens: int
) -> MemoryUse:
    """Run the largest prompt step on a small KV cache and read the peak; compiles its kernels too."""
    torch.cuda.synchronize()
    weights = torch.cuda.memory_allocated()
    # One less than the context: the made-up prompt has room for the token after it.
    num_tokens = min(config.scheduler.step_tokens, context_tokens - 1)
    num_pages = ceil_div(num_tokens + 1, layout.page_tokens)
    kv_bytes = num_pages * sum(k.page_bytes for k in layout.kinds)
    runner.kv_pages = allocate_kv(
        layout, {k.kind: num_pages for k in layout.kinds}, runner.tables.device
    )
    torch.cuda.reset_peak_memory_stats()
    runner.forward(prompt_step(layout, num_tokens))
    torch.cuda.synchronize()
    workspace = torch.cuda.max_memory_allocated() - weights - kv_bytes
    runner.kv_pages = []
    torch.cuda.empty_cache()
    graphs = 0
    if config.use_graphs:
        graphs = graph_bytes(config.scheduler.max_sequences, runner.model.config.vocab_size)
    return MemoryUse(weights=weights, workspace=workspace, graphs=graphs)
