"""Budgets of one step and of the queue."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from rose.utils.errors import ConfigError

Policy = Literal["first-come", "priority"]
POLICIES = get_args(Policy)
GPU_TOKENS = (16384, 4096)
CPU_TOKENS = (1024, 512)
"""So that a step of the embedded model stays well under a second: 0.26 s on two cores with other work beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler may put into one step."""

    max_step_tokens: int | None = None
    """New tokens of all sequences in one step; longer prompts are cut into chunks. None: 16384, on a CPU 1024."""
    max_mixed_tokens: int | None = None
    """The same while some sequences decode: their next token waits for the whole step. None: 4096, on a CPU 512."""
    max_sequences: int = 256
    """Sequences that run at once."""
    max_waiting: int = 1024
    """Requests that wait; more are refused at once with queue_full."""
    max_waiting_tokens: int = 4_194_304
    """The same in prompt tokens; an empty queue takes any prompt that fits the context."""
    policy: Policy = "first-come"
    """Who runs next and who gives way last: first-come, or by the `priority` of requests (smaller first)."""

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value}; allowed: 1 or more; change scheduler.{name}"
            for name, value in (
                ("max_step_tokens", self.max_step_tokens),
                ("max_mixed_tokens", self.max_mixed_tokens),
                ("max_sequences", self.max_sequences),
                ("max_waiting", self.max_waiting),
                ("max_waiting_tokens", self.max_waiting_tokens),
            )
            if value is not None and value < 1
        ]
        problems += [
            f"{name}={value} is less than max_sequences={self.max_sequences}; a decode step needs "
            f"one token per sequence; raise scheduler.{name} or lower scheduler.max_sequences"
            for name, value in (
                ("max_step_tokens", self.max_step_tokens),
                ("max_mixed_tokens", self.max_mixed_tokens),
            )
            if value is not None and 1 <= value < self.max_sequences
        ]
        if self.policy not in POLICIES:
            problems.append(
                f"policy={self.policy!r}; allowed: {', '.join(POLICIES)}; change scheduler.policy"
            )
        if problems:
            raise ConfigError(problems)

    @property
    def step_tokens(self) -> int:
        """Return the most new tokens of a step."""
        return GPU_TOKENS[0] if self.max_step_tokens is None else self.max_step_tokens

    @property
    def mixed_tokens(self) -> int:
        """Return the most new tokens of a step in which some sequences decode."""
        return GPU_TOKENS[1] if self.max_mixed_tokens is None else self.max_mixed_tokens

    def resolve(self, device: str) -> SchedulerConfig:
        """Return the same with the budgets that a device of this kind gets where none are given."""
        budgets = CPU_TOKENS if device == "cpu" else GPU_TOKENS
        step, mixed = (max(tokens, self.max_sequences) for tokens in budgets)
        return replace(
            self,
            max_step_tokens=step if self.max_step_tokens is None else self.max_step_tokens,
            max_mixed_tokens=mixed if self.max_mixed_tokens is None else self.max_mixed_tokens,
        )
