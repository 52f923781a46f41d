"""The memory plan of a checkpoint, made from its configuration alone: printed and refused before weights are read.

`rose serve` and `rose inspect` both ask here, so they tell the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rose.cache.layout import CacheLayout
from rose.config.engine import EngineConfig
from rose.config.model import ModelConfig
from rose.config.scheduler import SchedulerConfig
from rose.models.registry import ModelEntry
from rose.runtime import memory_words
from rose.runtime.footprint import footprint
from rose.runtime.limits import context_limit
from rose.runtime.memory import MemoryPlan, MemoryUse, plan_memory
from rose.utils.device import DeviceFacts
from rose.utils.errors import ConfigError
from rose.utils.math import round_up

_FRACTIONS = (0.95, 0.98)
_FORMATS = ("mxfp4", "fp8_block", "fp8_block_all", "bf16")
_E4M3_CAPABILITY = (8, 9)
"""Of a GPU that converts to and from E4M3."""
_LEAST_STEP_TOKENS = 256
_LEAST_TOKENS = 1024
_LEAST_SEQUENCES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """What a plan depends on besides the configuration."""

    entry: ModelEntry
    model_config: ModelConfig
    device: DeviceFacts
    free_bytes: int | None = None
    """Of the device, before anything of this engine is on it; None: not known."""
    asked: SchedulerConfig | None = None
    """Before it was resolved: budgets that nobody gave follow a change of `max_sequences`. None: all were given."""
    _uses: dict[tuple[Any, ...], MemoryUse] = field(default_factory=dict, init=False)
    """Found already: trying changes asks for the same again and again."""

    def plan(self, config: EngineConfig) -> MemoryPlan:
        """Divide the device's memory.

        Units    config is resolved
        Raises   ConfigError with the numbers, and the changes of one option that would make it fit
        """
        use = self._use(config)
        try:
            return self._divided(config, use)
        except ConfigError as error:
            fits = self._changes_that_fit(config)
            raise ConfigError(f"{error}. {fits}") from None

    def is_held(self, config: EngineConfig) -> bool:
        """Whether the plan would fit if nobody else were on the device."""
        alone = replace(self, free_bytes=None)
        return not self._is_fitting(config) and alone._is_fitting(config)

    def lines(self, config: EngineConfig, plan: MemoryPlan) -> list[str]:
        """Return the plan as a table."""
        return list(
            memory_words.table(
                plan,
                self._layout(config),
                config,
                self.device,
                context_tokens=context_limit(config, self.model_config),
                free_bytes=self.free_bytes,
            )
        )

    def _divided(self, config: EngineConfig, use: MemoryUse) -> MemoryPlan:
        context_tokens = context_limit(config, self.model_config)
        return plan_memory(
            layout=self._layout(config),
            cache=config.cache,
            scheduler=config.scheduler,
            use=use,
            device_bytes=self.device.memory_bytes,
            context_tokens=context_tokens,
            is_context_asked=config.context_tokens is not None,
            free_bytes=self.free_bytes,
        )

    def _use(self, config: EngineConfig) -> MemoryUse:
        longest = context_limit(config, self.model_config)
        if config.cache.kv_tokens is not None:
            longest = min(longest, config.cache.kv_tokens)
        scheduler = config.scheduler
        key = (longest, config.quant, scheduler.step_tokens, scheduler.max_sequences)
        if key not in self._uses:
            self._uses[key] = footprint(
                self.entry, self.model_config, config, self.device, context_tokens=longest
            )
        return self._uses[key]

    def _layout(self, config: EngineConfig) -> CacheLayout:
        return CacheLayout.of(
            self.model_config,
            config.cache,
            kv_element=config.quant.kv_element,
            tp=config.parallel.tp,
        )

    def _changes_that_fit(self, config: EngineConfig) -> str:
        """Try each option by itself; say the first value of each that fits."""
        found: dict[str, str] = {}
        asked = self.asked or config.scheduler
        for place, advice, changed in _changes(config, self.device, self.free_bytes, asked):
            if place not in found and self._is_fitting(changed):
                found[place] = advice
        if found:
            return f"What fits: {', or '.join(found.values())}"
        needed = self._use(config).total
        return (
            f"No single option makes it fit: without any KV the model takes {needed / memory_words.GIB:.2f} GiB; "
            "choose a larger device or a smaller model"
        )

    def _is_fitting(self, config: EngineConfig) -> bool:
        try:
            self._divided(config, self._use(config))
        except ConfigError:
            return False
        return True


def _changes(
    config: EngineConfig, device: DeviceFacts, free_bytes: int | None, asked: SchedulerConfig
) -> Iterator[tuple[str, str, EngineConfig]]:
    """Yield (option, advice, configuration) of changes worth trying, the mildest of each option first."""
    cache, scheduler = config.cache, config.scheduler
    if cache.kv_tokens is None:
        fractions = [f for f in _FRACTIONS if f > cache.memory_fraction]
        if free_bytes is not None and device.memory_bytes:
            # Rounded down: what is free must hold it.
            free = int(100 * free_bytes / device.memory_bytes) / 100
            fractions += [free] if 0.05 <= free < cache.memory_fraction else []
        for fraction in fractions:
            word = "raise" if fraction > cache.memory_fraction else "lower"
            advice = f"{word} cache.memory_fraction to {fraction}"
            changed = replace(cache, memory_fraction=fraction)
            yield "fraction", advice, replace(config, cache=changed)
    else:
        least = config.context_tokens or 2 * cache.page_tokens
        is_short = cache.kv_tokens < least
        fewer = _halves(cache.kv_tokens, max(_LEAST_TOKENS, cache.page_tokens))
        for tokens in (least,) if is_short else fewer:
            advice = f"{'raise' if is_short else 'lower'} cache.kv_tokens to {tokens}"
            yield "kv", advice, replace(config, cache=replace(cache, kv_tokens=tokens))
    if config.context_tokens is not None:
        # What the KV cache holds in whole pages, be it less than anybody would guess at.
        held = round_up(cache.kv_tokens or config.context_tokens, cache.page_tokens)
        shorter = [held] if held < config.context_tokens else []
        for tokens in (*shorter, *_halves(config.context_tokens, _LEAST_TOKENS)):
            yield (
                "context",
                f"lower context_tokens to {tokens}",
                replace(config, context_tokens=tokens),
            )
    least = max(_LEAST_STEP_TOKENS, scheduler.max_sequences)
    for tokens in _halves(scheduler.step_tokens, least):
        mixed = min(scheduler.mixed_tokens, tokens)
        changed = replace(scheduler, max_step_tokens=tokens, max_mixed_tokens=mixed)
        also = (
            "" if mixed == scheduler.mixed_tokens else f" and scheduler.max_mixed_tokens to {mixed}"
        )
        advice = f"lower scheduler.max_step_tokens to {tokens}{also}"
        yield "step", advice, replace(config, scheduler=changed)
    for count in _halves(scheduler.max_sequences, _LEAST_SEQUENCES):
        advice = f"lower scheduler.max_sequences to {count}"
        changed = replace(asked, max_sequences=count).resolve(device.kind)
        yield "sequences", advice, replace(config, scheduler=changed)
    if config.quant.kv_element != "e4m3" and (
        device.kind == "cpu" or device.capability >= _E4M3_CAPABILITY
    ):
        advice = "change quant.kv to fp8_e4m3"
        yield "kv format", advice, replace(config, quant=replace(config.quant, kv="fp8_e4m3"))
    for name in _FORMATS:
        advice = f"change quant.weights to {name}"
        yield "weights", advice, replace(config, quant=replace(config.quant, weights=name))


def _halves(value: int, least: int) -> Iterator[int]:
    """Yield powers of two below `value`, the largest first."""
    tokens = 1 << max(0, value - 1).bit_length()
    while (tokens := tokens // 2) >= least:
        if tokens < value:
            yield tokens
