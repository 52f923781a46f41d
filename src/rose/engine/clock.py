"""How long a step may take: predicted from the steps before it, so that a hang can be told from a long step.

Knows neither device nor channel. The service publishes the bound with the start of a step; whoever listens
decides how many times the bound is a hang.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rose.runtime.plan import StepPlan

FORGETTING = 0.99
"""The longest step counts less with each that follows; half after 69 steps. Guessed."""
LEAST_TOKENS = 32
"""Prompt tokens from which a step tells what one token takes; fewer hide behind what every step takes."""


class StepClock:
    """Times steps in the order of their launch; at most a few are under way."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._under_way: deque[tuple[float, int, float]] = deque()
        self.last_end = 0.0
        """When the newest step ended, on the clock of `time.monotonic`."""
        self.step_s = 0.0
        """Longest step without much of a prompt, forgetting old ones."""
        self.token_s = 0.0
        """Longest time per prompt token, likewise."""
        self.bound_s = 0.0
        """Most that the steps under way should take together; 0 without any."""

    def begin(self, plan: StepPlan) -> None:
        """Take note that a step is about to be launched."""
        num_tokens = 0
        for entry in plan.prefill:
            num_tokens += entry.num_tokens
        bound = self.step_s + self.token_s * num_tokens
        self._under_way.append((self._now(), num_tokens, bound))
        self.bound_s += bound

    def end(self) -> float:
        """Take note that the tokens of the oldest step are there; return the seconds it took by itself."""
        start, num_tokens, bound = self._under_way.popleft()
        now = self._now()
        # A step that was launched early ran behind the one before it.
        seconds = now - max(start, self.last_end)
        self.last_end = now
        self.bound_s = self.bound_s - bound if self._under_way else 0.0
        if num_tokens < LEAST_TOKENS:
            self.step_s = max(seconds, self.step_s * FORGETTING)
        else:
            rest = (seconds - self.step_s) / num_tokens
            self.token_s = max(rest, self.token_s * FORGETTING)
        return seconds
