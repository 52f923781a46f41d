"""The configuration tree of one engine: composed, frozen, `auto` resolved by one pure function."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rose.config.cache import CacheConfig
from rose.config.decoding import DecodingConfig
from rose.config.parallel import ParallelConfig
from rose.config.quant import QuantConfig
from rose.config.scheduler import SchedulerConfig
from rose.utils.device import DEVICES, DeviceFacts
from rose.utils.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsConfig:
    """Overrides of the kernel choice, for measuring and for hunting errors."""

    only: dict[str, str] = field(default_factory=dict)
    """Operation -> implementation that every step must use."""
    check_calls: bool = False
    """Run every contract's check_call on every eager call."""
    batch_invariant: bool | None = None
    """At temperature 0 the same tokens bit for bit, whatever shares the batch, however a prompt is cut into chunks,
    cached, preempted or not. None: on a CPU, unless `only` names kernels; on CUDA asking is refused until all kernels
    follow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from."""

    model: str
    """Folder of a checkpoint."""
    device: str = "auto"
    """auto, cpu or cuda."""
    context_tokens: int | None = None
    """Limit below the model's own; None: the model's."""
    use_graphs: bool = True
    """Replay decode steps from CUDA graphs (CUDA only)."""
    overlap: bool | None = None
    """Plan a step while the device computes the one before it. None: on CUDA, where host and device are two."""
    seed: int = 0
    """Seeds the seeds of requests that bring none."""
    quant: QuantConfig = field(default_factory=QuantConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)

    def __post_init__(self) -> None:
        problems = []
        if self.device not in DEVICES:
            problems.append(
                f"device {self.device!r} is not known; allowed: {', '.join(DEVICES)}; change device"
            )
        if self.context_tokens is not None and self.context_tokens < 2:
            problems.append(
                f"context_tokens={self.context_tokens}; allowed: 2 or more, of prompt and answer together; "
                "change context_tokens"
            )
        if not -(2**63) <= self.seed < 2**63:
            problems.append(
                f"seed={self.seed}; allowed: a signed 64-bit integer, as in requests; change seed"
            )
        if problems:
            raise ConfigError(problems)

    def resolve(self, device: DeviceFacts, *, checkpoint_format: str) -> EngineConfig:
        """Return the same tree with every `auto` decided; pure, so it is tested on any machine.

        `checkpoint_format` is what the experts are stored in: mxfp4, bf16 or fp8_block.
        """
        quant = self.quant
        activations = quant.activations
        if activations == "auto":
            activations = "bf16" if device.kind == "cuda" else "float32"
        quant = replace(
            quant,
            weights=checkpoint_format if quant.weights == "auto" else quant.weights,
            activations=activations,
            kv=activations if quant.kv == "auto" else quant.kv,
        )
        kernels = self.kernels
        if kernels.batch_invariant is None:
            # float64 and chosen kernels are for tests that compare with other computations.
            is_on = device.kind == "cpu" and activations != "float64" and not kernels.only
            kernels = replace(kernels, batch_invariant=is_on)
        cache = self.cache
        if cache.kv_tokens is None and device.kind == "cpu":
            cache = replace(cache, kv_tokens=32768)
        return replace(
            self,
            device=device.kind,
            use_graphs=self.use_graphs and device.kind == "cuda",
            quant=quant,
            cache=cache,
            scheduler=self.scheduler.resolve(device.kind),
            kernels=kernels,
        )
