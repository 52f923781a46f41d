"""What the engine counts, for EngineStatus. Rates and percentiles are whoever reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from rose.engine.sequence import Sequence
from rose.protocol.histogram import BOUNDS, Buckets
from rose.runtime.plan import StepPlan


class Histogram:
    """Counts values by bucket; one call is a microsecond or less."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound it does not pass."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def buckets(self) -> Buckets:
        """Return the counts so far."""
        return Buckets(list(self._counts), self._total)


def _histograms() -> dict[str, Histogram]:
    return {name: Histogram(bounds) for name, bounds in BOUNDS.items()}


@dataclass(slots=True)
class Counters:
    """Numbers that only grow, since the start of the engine."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens computed, those of preempted sequences again."""
    num_output_tokens: int = 0
    """Tokens sampled, the few that overlapping gives away included."""
    num_refused: int = 0
    """Requests that found the queue full."""
    num_expired: int = 0
    """Requests whose time was up."""
    num_aborted: int = 0
    """Requests that their frontend took back, those whose time was up not included."""
    num_grammar_failures: int = 0
    """Requests whose grammar could not be built, or stopped them."""
    num_damaged: int = 0
    """Requests that ended because the model's logits were not finite."""
    histograms: dict[str, Histogram] = field(default_factory=_histograms)

    def count_step(self, plan: StepPlan) -> None:
        """Add a launched step."""
        self.num_steps += 1
        num_tokens = 0
        for entry in plan.prefill:
            num_tokens += entry.num_tokens
        self.num_prompt_tokens += num_tokens
        self.histograms["step_tokens"].observe(num_tokens + len(plan.decode))

    def count_step_end(self, phase: str, seconds: float) -> None:
        """Add how long a step took."""
        self.histograms[f"step_seconds_{phase}"].observe(seconds)

    def count_grammar(self, seconds: float) -> None:
        """Add a request that waited so long for its grammar to be built or found."""
        self._observe("request_grammar_seconds", seconds)

    def count_ends(self, sequences: Iterable[Sequence], now: float) -> None:
        """Add requests that have just ended by themselves."""
        observe = self._observe
        for sequence in sequences:
            started, first = sequence.started_at, sequence.first_token_at
            observe("request_queue_seconds", started - sequence.arrived_at)
            observe("request_prefill_seconds", first - started)
            observe("request_decode_seconds", now - first)
            observe("request_inference_seconds", now - started)
            if sequence.num_output_tokens > 1:
                per_token = (now - first) / (sequence.num_output_tokens - 1)
                observe("request_time_per_output_token_seconds", per_token)

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)
