"""The requests that wait to run, in the order in which they will: bounded in number and in tokens. Knows no pages.

Order is by the request's priority (smaller first; all equal under first-come), then the order of
arrival. A preempted sequence keeps its own, so that it is not overtaken by those who came later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from rose.config.scheduler import SchedulerConfig
from rose.engine.sequence import Sequence


def order_of(sequence: Sequence) -> tuple[int, int]:
    """Return the key by which sequences are ordered, waiting and running."""
    return sequence.order


class WaitingQueue:
    """Who runs next, and whether another request must be refused."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._sequences: deque[Sequence] = deque()
        self._num_arrived = 0
        self.num_tokens = 0
        """Tokens of all that wait: prompts, and after a preemption the output so far."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence:
        """Return who runs next; there must be somebody."""
        return self._sequences[0]

    @property
    def is_full(self) -> bool:
        """Whether any other request must be refused."""
        return len(self._sequences) >= self._config.max_waiting

    def refusal(self, num_prompt_tokens: int, *, num_opening_tokens: int = 0) -> str | None:
        """Return why there is no room for a prompt of so many tokens, or None; an empty queue takes any.

        num_opening_tokens: of requests that will queue once their grammars are built
        """
        config, num_tokens = self._config, self.num_tokens + num_opening_tokens
        if self.is_full:
            return (
                f"{len(self)} requests are waiting, which is the most this server queues "
                "(scheduler.max_waiting)"
            )
        if num_tokens and num_tokens + num_prompt_tokens > config.max_waiting_tokens:
            return (
                f"{len(self)} requests with {num_tokens} tokens are waiting and this one has "
                f"{num_prompt_tokens}; this server queues {config.max_waiting_tokens} tokens at most "
                "(scheduler.max_waiting_tokens)"
            )
        return None

    def add(self, sequence: Sequence) -> None:
        """Put a sequence where its order puts it; one that is new gets its order here."""
        priority, arrival = sequence.order
        if not arrival:
            self._num_arrived += 1
            sequence.order = (priority, self._num_arrived)
        waiting, place = self._sequences, len(self._sequences)
        if waiting and sequence.order < waiting[0].order:
            place = 0  # the usual place of one that was preempted
        while place > 0 and sequence.order < waiting[place - 1].order:
            place -= 1
        waiting.insert(place, sequence)
        self.num_tokens += sequence.num_tokens

    def take_first(self) -> Sequence:
        """Take out who runs next."""
        sequence = self._sequences.popleft()
        self.num_tokens -= sequence.num_tokens
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence wherever it stands."""
        self._sequences.remove(sequence)
        self.num_tokens -= sequence.num_tokens
