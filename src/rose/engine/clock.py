"""How long a step may take: predicted from the steps before it, so that a hang can be told from a long step.

Knows neither device nor channel. The service publishes the bound with the start of a step; whoever listens
decides how many times the bound is a hang.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rose.protocol.sampling_params import SamplingParams
from rose.runtime.plan import StepPlan

FORGETTING = 0.95
"""The longest step counts less with each that follows, half after 14: one that was held up by other work on the machine
must not blunt the watch for long, and five bounds leave room for the next. Guessed."""
LEAST_TOKENS = 32
"""Prompt tokens from which a step tells what one token takes; fewer hide behind what every step takes."""


FIRST_SECONDS = 6.0
"""What a GPU may compile and capture while it serves, where a request is the first to ask for log-probabilities,
penalties, a grammar ...; not measured: a Triton kernel takes one to three seconds, a graph less than one."""
FIRST_STEPS = 8
"""Steps after such a request that may still meet something new: its prompt, its decode, the graphs of both."""


class StepClock:
    """Times steps in the order of their launch; at most a few are under way."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._features: set[tuple[bool, ...]] = set()
        self._num_first = 0
        self.first_s = 0.0
        """Added to the bound of steps that may do something for the first time; 0 where nothing is compiled."""
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
            if entry.sampling is not None:
                self._note(_features(entry.sampling))
        if plan.masks:
            self._note((True,))
        bound = self.step_s + self.token_s * num_tokens
        if self._num_first:
            self._num_first -= 1
            bound += self.first_s
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

    def _note(self, features: tuple[bool, ...]) -> None:
        if features not in self._features:
            self._features.add(features)
            self._num_first = FIRST_STEPS


def _features(sampling: SamplingParams) -> tuple[bool, ...]:
    """Return what of sampling takes kernels or graphs of its own."""
    return (
        sampling.temperature == 0,
        sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0,
        sampling.changes_logits,
        sampling.logprobs is not None,
    )
