"""What the engine counts, for EngineStatus. Rates and percentiles are the frontend's."""

from __future__ import annotations

from dataclasses import dataclass

from rose.runtime.plan import StepPlan


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

    def count_step(self, plan: StepPlan) -> None:
        """Add a launched step."""
        self.num_steps += 1
        for entry in plan.prefill:
            self.num_prompt_tokens += entry.num_tokens
