"""An engine on synthetic weights of real shapes, made on the device from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig, KernelsConfig
from rose.config.quant import QuantConfig
from rose.config.scheduler import GPU_TOKENS, SchedulerConfig
from rose.engine.engine import LLMEngine
from rose.kernels.registry import require_implementations
from rose.models.gpt_oss.checkpoints import configuration
from rose.models.gpt_oss.config import GptOssConfig
from rose.models.gpt_oss.model import GptOss
from rose.models.gpt_oss.synthetic import synthetic_model
from rose.models.registry import entry
from rose.runtime.ahead import begin_ahead
from rose.utils.device import DeviceFacts, detect
from rose.utils.threads import fit_threads

SIZES = ("20b", "120b", "tiny")


@dataclass(frozen=True, kw_only=True)
class BenchSetup:
    """What one bench run serves."""

    size: str
    config: EngineConfig
    model_config: GptOssConfig
    device: DeviceFacts
    seed: int
    is_option: bool = False
    """Its lines are marked as options, beside the score table: KV is narrower than bf16, projections have a format of
    their own, layers were cut off, or a step holds other than the usual tokens."""

    @property
    def name(self) -> str:
        """Name of the serving configuration, for the result lines."""
        quant, tokens = self.config.quant, self.config.scheduler.step_tokens
        dense = "" if quant.projections is None else f"projections={quant.projections} "
        words = f"weights={quant.weights} {dense}activations={quant.activations} kv={quant.kv}"
        return words if tokens == GPU_TOKENS[0] else f"{words} step={tokens}"


def setup(
    *,
    size: str,
    weights: str,
    projections: str | None = None,
    kv: str = "auto",
    device: str,
    only: dict[str, str] | None = None,
    seed: int = 0,
    layers: int | None = None,
    kv_tokens: int | None = None,
    prefix_cache: bool = True,
    max_step_tokens: int = GPU_TOKENS[0],
    max_mixed_tokens: int = 4096,
    graphs: bool = True,
) -> BenchSetup:
    """Compose and resolve the configuration of a bench run."""
    require_implementations(only or {})  # before weights are drawn
    facts = detect(device)
    model_config = configuration(size, num_layers=layers)
    config = EngineConfig(
        model=f"synthetic gpt-oss-{size}",
        device=device,
        use_graphs=graphs,
        quant=QuantConfig(weights=weights, projections=projections, kv=kv),
        cache=CacheConfig(kv_tokens=kv_tokens, prefix_cache=prefix_cache),
        scheduler=SchedulerConfig(
            max_step_tokens=max_step_tokens, max_mixed_tokens=max_mixed_tokens
        ),
        kernels=KernelsConfig(only=only or {}),
    ).resolve(facts, checkpoint_format="mxfp4")
    return BenchSetup(
        size=size,
        config=config,
        model_config=model_config,
        device=facts,
        seed=seed,
        is_option=layers is not None
        or max_step_tokens != GPU_TOKENS[0]
        or config.quant.kv == "fp8_e4m3"
        or config.quant.projections is not None,
    )


def build(bench: BenchSetup, report: Callable[[str], None] = lambda _text: None) -> LLMEngine:
    """Make the model on the device and the engine around it; `report` is told what is being done."""
    report(f"drawing the weights of gpt-oss-{bench.size}")
    model = build_model(bench)
    report("building the engine")
    return build_engine(model, bench, report)


def build_model(bench: BenchSetup) -> GptOss:
    """Draw the weights on the device, while kernels are being compiled."""
    _begin_compiling(bench)
    return synthetic_model(bench.model_config, bench.config, bench.device, seed=bench.seed)


def _begin_compiling(bench: BenchSetup) -> None:
    """Begin what a server has begun when it reads weights: the dry model of its memory plan begins to compile the
    model's CUDA sources."""
    if bench.device.kind != "cuda":
        return
    model_config, config = bench.model_config, bench.config
    entry(model_config.architecture).dry_model(
        model_config, config, bench.device, context_tokens=model_config.context_tokens
    )
    begin_ahead(model_config, config, bench.device)


def build_engine(
    model: GptOss, bench: BenchSetup, report: Callable[[str], None] = lambda _text: None
) -> LLMEngine:
    """Make the engine around a model, warmed up; with as many CPU threads as serving such a model has."""
    fit_threads(model.weight_bytes, bench.device)
    return LLMEngine.from_model(model, bench.config, report=report)
