"""Who runs in the next step, with how many tokens and on which pages. No torch, no device, no events.

Decoding sequences take one token each, then prompts fill the rest of the budget in chunks, then waiting requests
enter in the order of `WaitingQueue`, each from where the prefix cache ends. When pages run out, the running sequence
that is last in order is preempted (the youngest; by priority, the youngest of the least urgent): it gives up its
pages and is computed anew later. The first in order therefore always goes on, so everyone ends; nobody is preempted
only because something more urgent waits. `schedule` may be called for step n+1 before step n is committed.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from rose.cache.table import PageTable, PageUpdates
from rose.config.scheduler import SchedulerConfig
from rose.engine.grammar_state import GrammarState
from rose.engine.sequence import Sequence, SequenceState
from rose.engine.waiting import WaitingQueue, order_of
from rose.runtime.plan import MAX_HIT_COLUMNS, PlanEntry, StepPlan

_NO_PAGES: PageUpdates = {}


class Flight:
    """A step that was planned and not yet committed: who samples, in the plan's order."""

    __slots__ = ("first_of", "masks", "phase", "sequences", "slots", "step")

    def __init__(self, step: int, slots: list[int], sequences: list[Sequence]) -> None:
        self.step, self.slots, self.sequences = step, slots, sequences
        self.phase = "decode"
        """What the step is made of: prefill, decode or mixed."""
        self.first_of: list[Sequence] = []
        """Those whose prompt ends in this step."""
        self.masks: dict[int, bytes | None] = {}

    def send_mask(self, sequence: Sequence, grammar: GrammarState) -> None:
        """Send a mask that the sequence's slot does not have; under a grammar the token after waits for the next."""
        if not grammar.is_sent:
            self.masks[sequence.slot], grammar.is_sent = grammar.mask, True
        sequence.is_held = grammar.is_ruling


class Scheduler:
    """Owns the queues, the slots and the pages of all sequences."""

    def __init__(self, config: SchedulerConfig, table: PageTable) -> None:
        self.config = config
        self.table = table
        self.waiting = WaitingQueue(config)
        self.running: list[Sequence] = []
        """In order; the last is preempted first, and never one that the step has planned."""
        self.flights: deque[Flight] = deque()
        self.num_preemptions = 0
        self.num_queried_tokens = 0
        """Prompt tokens that were looked up in the prefix cache, each request's once."""
        self.num_cached_tokens = 0
        """Prompt tokens that came from the prefix cache; a preempted sequence counts as it first started."""
        self._free_slots = list(range(config.max_sequences - 1, -1, -1))
        self._in_slot: dict[int, Sequence] = {}
        self._computed: list[Sequence] = []
        """Whose prompts the last step goes on with."""
        self._step = 0

    @property
    def has_work(self) -> bool:
        """Whether a call of `schedule` or a commit is still to come."""
        return bool(self.running or self.waiting or self.flights)

    def add(self, sequence: Sequence) -> None:
        """Put a request into the queue."""
        self.waiting.add(sequence)

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or return None where nobody can run before a commit.

        Aliasing  the plan's decode entries are reused by the next call
        """
        self._register_computed()
        self._free_dead_pages()
        flight = Flight(self._step, [], [])
        preemptions = self.num_preemptions
        decode, longest = self._plan_decode(flight)
        limit = self.config.step_tokens
        if decode:
            limit = min(limit, self.config.mixed_tokens)
        prefill: list[PlanEntry] = []
        budget = limit - len(decode)
        is_prompt_left = False
        for sequence in self.running:
            if sequence.num_scheduled < sequence.prefill_end and not sequence.is_held:
                budget -= self._plan_chunk(sequence, budget, flight, prefill)
                is_prompt_left |= sequence.num_scheduled < sequence.prefill_end
        if self.num_preemptions == preemptions and not is_prompt_left:
            self._admit(budget, flight, prefill)
        if not decode and not prefill:
            return None
        if prefill:
            self._computed = [self._in_slot[entry.slot] for entry in prefill]
            flight.phase = "mixed" if decode else "prefill"
        self.flights.append(flight)
        self._step += 1
        longest = max([longest] + [e.start_position + e.num_tokens for e in prefill])
        return StepPlan(
            step=flight.step,
            decode=decode,
            prefill=prefill,
            sample_slots=flight.slots,
            max_length=longest,
            masks=flight.masks,
        )

    def _free_dead_pages(self) -> None:
        """Free what no later token sees, before anyone allocates."""
        for sequence in self.running:
            if sequence.num_scheduled >= sequence.pages.free_position:
                self.table.free_behind(sequence.pages, sequence.num_scheduled)

    def _plan_decode(self, flight: Flight) -> tuple[list[PlanEntry], int]:
        """Give every decoding sequence its token; return the entries and the greatest length."""
        entries: list[PlanEntry] = []
        slots, sequences, running = flight.slots, flight.sequences, self.running
        longest = i = 0
        while i < len(running):
            sequence = running[i]
            i += 1
            length = sequence.num_tokens
            position = sequence.num_scheduled
            # Not decoding yet, or its last token is in flight and needs no successor.
            if position < sequence.prefill_end or length >= sequence.max_length or sequence.is_held:
                continue
            entry = sequence.decode_entry
            if position >= sequence.pages.capacity_tokens:
                updates = self._grow_or_preempt(sequence, length)
                if updates is None:
                    continue
                entry.new_pages = updates
            elif entry.new_pages:
                entry.new_pages = _NO_PAGES
            entry.start_position = position
            sequence.num_scheduled = length
            sequence.num_tokens = length + 1
            sequence.num_pending += 1
            if sequence.grammar is not None:
                flight.send_mask(sequence, sequence.grammar)
            if length > longest:
                longest = length
            entries.append(entry)
            slots.append(sequence.slot)
            sequences.append(sequence)
        return entries, longest

    def _grow_or_preempt(self, sequence: Sequence, num_tokens: int) -> PageUpdates | None:
        """Make room by preempting the last in order; None: the sequence itself had to go."""
        while True:
            updates = self.table.grow(sequence.pages, num_tokens)
            if updates is not None:
                return updates
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return None

    def _preempt(self, victim: Sequence) -> None:
        self.num_preemptions += 1
        self._release(victim)
        victim.stop_running(SequenceState.WAITING)
        self.waiting.add(victim)

    def _plan_chunk(
        self,
        sequence: Sequence,
        budget: int,
        flight: Flight,
        prefill: list[PlanEntry],
        *,
        is_new: bool = False,
    ) -> int:
        """Append the next chunk of a prompt, as far as budget and pages reach; return its tokens.

        Without a page the sequence keeps what it has and sits the step out: nobody is preempted for a prompt. At
        most one is in progress, and those that decode end or give way.
        """
        start = sequence.num_scheduled
        end = min(sequence.prefill_end, start + budget)
        end = self.table.reachable_tokens(sequence.pages, end)
        if end <= start:
            return 0
        updates = self.table.grow(sequence.pages, end)
        assert updates is not None, "reachable tokens are not reachable"
        is_last = end == sequence.prefill_end
        is_new |= sequence.is_rewound
        sequence.is_rewound = False
        prefill.append(
            PlanEntry(
                slot=sequence.slot,
                is_new=is_new,
                start_position=start,
                token_ids=sequence.token_ids[start:end],
                num_tokens=end - start,
                is_last_chunk=is_last,
                # A slot that was just taken knows nothing of the pages of a hit.
                new_pages=self.table.held(sequence.pages) if is_new else updates,
                sampling=sequence.sampling if is_new else None,
                history=sequence.history() if is_new else None,
            )
        )
        sequence.num_scheduled = end
        if is_last:
            sequence.num_tokens += 1
            sequence.num_pending += 1
            flight.slots.append(sequence.slot)
            flight.sequences.append(sequence)
            flight.first_of.append(sequence)
            if sequence.grammar is not None:
                flight.send_mask(sequence, sequence.grammar)
        return end - start

    def _admit(self, budget: int, flight: Flight, prefill: list[PlanEntry]) -> None:
        """Let waiting requests in, in their order, while budget, slots and pages last."""
        num_hit_columns = 0
        while budget > 0 and self.waiting and self._free_slots:
            sequence = self.waiting.first
            if sequence.num_pending or sequence.is_held:
                return
            hit = self.table.find(sequence.keys, sequence.token_ids)
            # A prompt enters when the whole of it fits and each running sequence could take one more page:
            # otherwise it would stop half way, or be preempted soon after.
            if not self.table.has_room(sequence.num_tokens, hit, spare_pages=len(self.running)):
                return
            num_hit_columns += hit.num_columns
            if hit.num_columns < num_hit_columns and num_hit_columns > MAX_HIT_COLUMNS:
                return
            self.waiting.take_first()
            pages = self.table.open(hit, sequence.num_tokens)
            if sequence.start(self._free_slots.pop(), pages, hit.num_tokens):
                self.num_queried_tokens += sequence.num_prompt_tokens
                self.num_cached_tokens += hit.num_tokens
            self._in_slot[sequence.slot] = sequence
            insort(self.running, sequence, key=order_of)
            budget -= self._plan_chunk(sequence, budget, flight, prefill, is_new=True)
            if sequence.num_scheduled < sequence.prefill_end:
                return

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; what it has in flight will be ignored."""
        if sequence.state is SequenceState.RUNNING:
            self._release(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.stop_running(SequenceState.FINISHED)

    def _release(self, sequence: Sequence) -> None:
        if self.running[-1] is sequence:
            self.running.pop()
        else:
            self.running.remove(sequence)
        self._register(sequence)
        del self._in_slot[sequence.slot]
        self._free_slots.append(sequence.slot)
        self.table.close(sequence.pages)

    def _register_computed(self) -> None:
        """Offer the pages of the last step's chunks to others.

        Not with their step: what shares a step would read pages that it writes, and hashing a prompt would delay
        its launch.
        """
        for sequence in self._computed:
            # Who has given up its pages since has offered them then.
            if sequence.state is SequenceState.RUNNING:
                self._register(sequence)
        self._computed = []

    def _register(self, sequence: Sequence) -> None:
        """Offer the sequence's full pages to others; the host must know their tokens, and may lag behind."""
        known = min(sequence.num_scheduled, len(sequence.token_ids))
        self.table.register(sequence.pages, sequence.keys, sequence.token_ids, known)
