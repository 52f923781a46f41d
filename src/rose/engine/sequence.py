"""One request inside the engine: a small state machine. Knows no batch, no device and no queue."""

from __future__ import annotations

import time
from enum import Enum, auto

from rose.cache.keys import PageKeys
from rose.cache.table import SequencePages
from rose.engine.grammar_state import GrammarState
from rose.protocol.event import FinishReason
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams
from rose.runtime.plan import PlanEntry, SlotHistory

_NO_PAGES = SequencePages(0)
_NO_ENTRY = PlanEntry.decode(-1)


class SequenceState(Enum):
    """WAITING -> RUNNING -> FINISHED, with RUNNING -> WAITING when preempted."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Tokens and progress of one request.

    `num_tokens` counts the tokens that exist, the sampled ones that are still on the device included;
    `num_scheduled` counts those whose KV is computed or being computed. Below `prefill_end` the sequence
    prefills; from there on it decodes, and the token to compute is the last sampled one.
    """

    __slots__ = (
        "arrived_at",
        "deadline",
        "decode_entry",
        "first_token_at",
        "grammar",
        "has_started",
        "is_held",
        "is_rewound",
        "keys",
        "max_length",
        "num_cached_tokens",
        "num_pending",
        "num_prompt_tokens",
        "num_scheduled",
        "num_stale",
        "num_tokens",
        "order",
        "pages",
        "prefill_end",
        "request_id",
        "sampling",
        "slot",
        "started_at",
        "state",
        "stop_ids",
        "timeout_s",
        "token_ids",
    )

    def __init__(self, request: Request, sampling: SamplingParams) -> None:
        self.request_id = request.request_id
        self.sampling = sampling
        """With the seed filled in."""
        self.order: tuple[int, int] = (request.priority, 0)
        """Priority, then order of arrival, which the queue gives; kept when preempted."""
        self.arrived_at = time.monotonic()
        self.started_at = 0.0
        self.first_token_at = 0.0
        """Moments on the clock of `time.monotonic`; 0 before they come."""
        self.timeout_s = request.timeout_s or 0.0
        self.deadline = None if request.timeout_s is None else self.arrived_at + request.timeout_s
        """When it ends with request_timeout."""
        self.stop_ids = frozenset(request.stop_token_ids)
        self.token_ids = list(request.prompt_token_ids)
        """Prompt and output, as far as the host knows it."""
        self.keys = PageKeys(request.cache_salt)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_length = self.num_prompt_tokens + request.max_tokens
        self.num_tokens = self.num_prompt_tokens
        self.num_pending = 0
        """Sampled tokens that the host does not know yet."""
        self.num_scheduled = 0
        self.num_cached_tokens = 0
        """Prompt tokens from the prefix cache at its first start, until an event has said so."""
        self.has_started = False
        self.prefill_end = 0
        """Tokens known when it began to run: the prompt, after a preemption the output too."""
        self.state = SequenceState.WAITING
        self.slot = -1
        self.pages = _NO_PAGES
        self.decode_entry = _NO_ENTRY
        """Its share of every decode step, made once; the scheduler updates it."""
        self.grammar: GrammarState | None = None
        self.is_held = False
        """Its next token waits for the mask of a grammar."""
        self.num_stale = 0
        """Pending tokens that were sampled without the mask they needed; they are dropped when they come."""
        self.is_rewound = False
        """Its slot counts tokens that were dropped: the next chunk writes the slot anew."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated, as far as the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    def history(self) -> SlotHistory | None:
        """Return its tokens where its parameters look back; all of them are known to the host."""
        if not self.sampling.changes_logits:
            return None
        return SlotHistory(
            prompt_ids=self.token_ids[: self.num_prompt_tokens],
            output_ids=self.token_ids[self.num_prompt_tokens :],
            stop_ids=sorted(self.stop_ids),
        )

    def start(self, slot: int, pages: SequencePages, num_cached_tokens: int = 0) -> bool:
        """Begin to run, or run again after a preemption, from the first token that is not cached.

        Returns  whether it is the first time; later it may find what it computed itself
        """
        assert self.state is SequenceState.WAITING, f"{self.request_id} starts while {self.state}"
        assert self.num_pending == 0, f"{self.request_id} starts before its last token is known"
        self.state = SequenceState.RUNNING
        self.slot, self.pages = slot, pages
        self.num_tokens = self.prefill_end = len(self.token_ids)
        self.num_scheduled = num_cached_tokens
        self.decode_entry = PlanEntry.decode(slot)
        self.is_rewound = False
        if self.grammar is not None:
            self.grammar.is_sent = False
        is_first, self.has_started = not self.has_started, True
        if is_first:
            self.started_at = time.monotonic()
            self.num_cached_tokens = num_cached_tokens
        return is_first

    def stop_running(self, state: SequenceState) -> None:
        """Give up slot and pages (the scheduler has freed them) to wait again or for good."""
        assert self.state is not SequenceState.FINISHED, f"{self.request_id} ends twice"
        self.state = state
        self.slot, self.pages, self.decode_entry = -1, _NO_PAGES, _NO_ENTRY
        self.num_scheduled = 0

    def hold(self) -> None:
        """Wait for the mask of a grammar that just began to rule.

        A token that is pending was sampled without it: it is given up, and the last known token computed again.
        """
        self.is_held = True
        if not self.num_pending:
            return
        self.num_stale = self.num_pending
        # One that was preempted sheds its stale tokens when it starts again: until then its queue counts them.
        if self.state is SequenceState.RUNNING:
            self.num_tokens = self.prefill_end = len(self.token_ids)
            self.num_scheduled = self.num_tokens - 1
            self.is_rewound = True

    def drop_stale(self) -> None:
        """Take note that a stale token came."""
        self.num_pending -= 1
        self.num_stale -= 1

    def append(self, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """Take the tokens sampled in one step, up to the first that ends the request.

        Returns  the tokens taken and why the request ends, or None
        """
        self.num_pending -= 1
        known, stop_ids, max_length = self.token_ids, self.stop_ids, self.max_length
        if len(token_ids) == 1:  # nearly always: without a loop it takes half the time
            token = token_ids[0]
            known.append(token)
            if token in stop_ids:
                return token_ids, "stop"
            return token_ids, "length" if len(known) >= max_length else None
        for i, token in enumerate(token_ids, start=1):
            known.append(token)
            if token in stop_ids:
                return token_ids[:i], "stop"
            if len(known) >= max_length:
                return token_ids[:i], "length"
        return token_ids, None
