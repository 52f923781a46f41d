"""From a model to a decoder that is ready to launch steps: runner, memory, sampler, graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rose.config.engine import EngineConfig
from rose.decoders.base import Decoder
from rose.decoders.registry import find_decoder
from rose.kernels.registry import KernelRow
from rose.models.base import CausalLM
from rose.runtime.assemble import Assembly, assemble
from rose.runtime.load import load_model
from rose.runtime.memory import MemoryPlan
from rose.sampling.sampler import Sampler
from rose.utils.device import DeviceFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltDecoder:
    """A decoder and what the engine must know of what is below it."""

    decoder: Decoder
    config: EngineConfig
    """Resolved."""
    assembly: Assembly
    vocab_size: int

    def lines(self) -> list[str]:
        """Return the start-up table: memory, then kernels and how they were compiled."""
        rows = _by_implementation(self.decoder.kernel_table())
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return [
            *self.assembly.memory_lines,
            *(
                "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
                for row in rows
            ),
            *(
                [self.assembly.ahead_kernels.outcome()]
                if self.assembly.device.kind == "cuda"
                else []
            ),
        ]


def _by_implementation(table: list[KernelRow]) -> list[tuple[str, str, str]]:
    """Join the regimes of an operation that have the same implementation: (operation, implementation, regimes).

    A fusion is asked for in some steps only; where its parts run instead, the regime says how.
    """
    rows: dict[tuple[str, str], list[KernelRow]] = {}
    for row in table:
        rows.setdefault((row.operation, row.told), []).append(row)
    most = Counter(row.operation for row in table)
    return [
        (op, told, "everywhere" if len(found) == most[op] > 1 else ", ".join(map(_steps, found)))
        for (op, told), found in rows.items()
    ]


def _steps(row: KernelRow) -> str:
    """Return a row's regime ("decode 2..16") in words for who runs a server."""
    regime = row.regime
    counted = {"decode": "sequence", "prefill": "token"}[regime.phase]
    how = ": layer by layer, as other steps" if row.is_unfused else ""
    if regime.is_endless:
        rows = f"{regime.min_rows} or more"
    elif regime.min_rows == regime.max_rows:
        rows = f"{regime.min_rows}"
    else:
        rows = f"{regime.min_rows} to {regime.max_rows}"
    return f"{regime.phase} of {rows} {counted}{'' if rows == '1' else 's'}{how}"


def build_decoder(
    model: CausalLM,
    config: EngineConfig,
    device: DeviceFacts,
    report: Callable[[str], None],
    *,
    planned: MemoryPlan | None = None,
) -> BuiltDecoder:
    """Build everything between a loaded model and the engine, warmed up.

    Units    config is resolved; planned: the memory plan made before loading, if there was one
    Raises   ConfigError where memory, context or a name does not allow it
    """
    build = find_decoder(config.decoding.decoder)
    assembly = assemble(model, config, device, report, planned=planned)
    sampler = Sampler.build(model.config.vocab_size, device, kernels=config.kernels)
    decoder = build(config, assembly.runner, sampler, assembly.memory.context_tokens)
    decoder.warm_up(report)
    if device.kind == "cuda":
        assembly.late_kernels.watch()
    return BuiltDecoder(
        decoder=decoder,
        config=config,
        assembly=assembly,
        vocab_size=model.config.vocab_size,
    )


def load_decoder(
    config: EngineConfig, device: DeviceFacts, report: Callable[[str], None]
) -> BuiltDecoder:
    """Load the checkpoint that the configuration names and build everything around it.

    Raises   ConfigError, CheckpointError
    """
    loaded = load_model(config, device, report)
    return build_decoder(loaded.model, loaded.config, device, report, planned=loaded.planned)
