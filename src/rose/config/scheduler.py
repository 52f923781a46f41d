"""Budgets of one step and of the queue."""

from __future__ import annotations

from dataclasses import dataclass

from rose.utils.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler may put into one step."""

    max_step_tokens: int = 16384
    """New tokens of all sequences in one step; longer prompts are cut into chunks."""
    max_mixed_tokens: int = 4096
    """The same while some sequences decode: their next token waits for the whole step."""
    max_sequences: int = 256
    """Sequences that run at once."""
    max_waiting: int = 1024
    """Requests that wait; more are refused at once with queue_full."""

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value}; allowed: 1 or more; change scheduler.{name}"
            for name, value in (
                ("max_step_tokens", self.max_step_tokens),
                ("max_mixed_tokens", self.max_mixed_tokens),
                ("max_sequences", self.max_sequences),
                ("max_waiting", self.max_waiting),
            )
            if value < 1
        ]
        problems += [
            f"{name}={value} is less than max_sequences={self.max_sequences}; a decode step needs "
            f"one token per sequence; raise scheduler.{name} or lower scheduler.max_sequences"
            for name, value in (
                ("max_step_tokens", self.max_step_tokens),
                ("max_mixed_tokens", self.max_mixed_tokens),
            )
            if 1 <= value < self.max_sequences
        ]
        if problems:
            raise ConfigError(problems)
