"""Which tokens may come next where a grammar rules: matchers on threads of their own, beside the device's work.

The engine's loop hands over what was sampled and goes on; packed bits come back some tens of microseconds later, and
only the sequence they belong to waits for them. Tokens and grammar texts only: what they spell is the frontend's
business. docs/grammars.md tells the whole way.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from rose.engine.grammar_state import GrammarState
from rose.engine.matcher_thread import Job, MatcherThread, Settled
from rose.engine.matchers import Matcher, TokenTrie
from rose.engine.sequence import Sequence, SequenceState
from rose.protocol.grammar import Constraint, Vocabulary

MAX_VOCABULARIES = 4
"""Kept; one takes about 60 MB for 200,000 tokens, and frontends of one model share one."""
IDLE_SECONDS = 0.02
"""Longest wait for a mask where nothing else can run; messages are read in between."""
LIMIT_SECONDS = 10.0
"""A grammar that takes longer to build or to follow has failed; both take milliseconds."""
PATIENCE_SECONDS = 0.0005
"""Longest wait for masks while the device is busy with the step before: much less than a step takes, so that nobody is
held up, and enough for the masks of 128 sequences on 8 threads."""


class Grammars:
    """All grammars of one engine; its methods are for the engine's thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tries: OrderedDict[str, TokenTrie] = OrderedDict()
        self._results: queue.SimpleQueue[Settled] = queue.SimpleQueue()
        self._early: list[Settled] = []
        self._due: dict[Sequence, float] = {}
        """Who waits for a result, and until when; the longest wait first. Not by request id: another request may have
        the id of one that was aborted while it waited."""
        self._num_masks = 0
        """How many of them run already, under a grammar."""
        self._opening: dict[str, Sequence] = {}
        self._is_used = False
        # Two threads, so that a large grammar of one request holds up no token of another.
        self._builder = MatcherThread("grammar-builder", self._results)
        self._matcher = MatcherThread("grammar-matcher", self._results)

    @property
    def vocabularies(self) -> list[str]:
        """Return the keys of the known vocabularies."""
        return list(self._tries)

    @property
    def is_used(self) -> bool:
        """Whether any request ever brought grammars."""
        return self._is_used

    @property
    def is_busy(self) -> bool:
        """Whether a result is still to come."""
        return bool(self._due or self._early)

    @property
    def num_opening(self) -> int:
        """Return how many requests wait for their grammars to be built."""
        return len(self._opening)

    @property
    def num_opening_tokens(self) -> int:
        """Return how many tokens they have together."""
        return sum(sequence.num_tokens for sequence in self._opening.values())

    def learn(self, vocabulary: Vocabulary) -> None:
        """Get to know a vocabulary; takes most of a second for 200,000 tokens, once.

        Not on a thread: the library keeps Python to itself meanwhile.
        """
        if vocabulary.key in self._tries:
            return
        trie = TokenTrie(vocabulary, self._vocab_size)
        self._tries[vocabulary.key] = trie
        while len(self._tries) > MAX_VOCABULARIES:
            self._tries.popitem(last=False)
        trie.build()

    def knows(self, constraint: Constraint) -> bool:
        """Tell whether the vocabulary of a constraint is there."""
        return constraint.vocabulary in self._tries

    def open(self, sequence: Sequence, constraint: Constraint) -> None:
        """Begin to build the grammars of a new sequence; `settle` says when it may be queued."""
        state = GrammarState(constraint, self._tries[constraint.vocabulary])
        sequence.grammar, self._is_used = state, True
        state.num_seen = len(sequence.token_ids)
        first = state.started_by(sequence.token_ids, len(sequence.token_ids))
        state.is_ruling = first is not None
        self._opening[sequence.request_id] = sequence
        self._submit(self._builder, sequence, lambda: state.build(first))

    def close(self, sequence: Sequence) -> bool:
        """Forget a sequence; tell whether it was not queued yet."""
        return self._opening.pop(sequence.request_id, None) is not None

    def take(self, sequences: list[Sequence]) -> None:
        """Look at what was just committed to constrained sequences; some of them now wait for a mask."""
        for sequence in sequences:
            state = sequence.grammar
            if state is None or sequence.state is SequenceState.FINISHED:
                continue
            if state.num_seen < len(sequence.token_ids):
                state.num_seen = len(sequence.token_ids)
                self._take(sequence, state)

    def settle(self) -> Iterator[Settled]:
        """Apply what the threads have found since, and yield it: sequences to queue, and errors.

        A sequence whose mask came may be planned again.
        """
        while not self._results.empty():
            self._note(self._results.get())
        self._give_up_late()
        found_early, self._early = self._early, []
        for found in found_early:
            sequence = found.sequence
            if sequence.state is SequenceState.FINISHED:
                continue
            if found.error is not None:
                yield found
            elif self._opening.pop(sequence.request_id, None) is not None:
                if found.mask is not None and sequence.grammar is not None:
                    sequence.grammar.set_mask(found.mask)
                yield found
            else:
                self._resume(sequence, found.mask)

    def wait_idle(self) -> None:
        """Wait a moment for any result, where nothing else can be done."""
        if self._due and not self._early:
            self._wait(IDLE_SECONDS)

    def wait_busy(self) -> None:
        """Wait for the masks that are being computed, but never long: the device has a step to do meanwhile."""
        end = time.monotonic() + PATIENCE_SECONDS if self._num_masks else 0.0
        while self._num_masks and (left := end - time.monotonic()) > 0:
            self._wait(left)

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._note(self._results.get(timeout=seconds))

    def _note(self, found: Settled) -> None:
        if self._due.pop(found.sequence, None) is not None:
            self._num_masks -= found.sequence.is_held
            self._early.append(found)

    def _give_up_late(self) -> None:
        """End those whose result is long overdue; the limits of the library should not let it happen."""
        while self._due:
            sequence, deadline = next(iter(self._due.items()))
            if time.monotonic() < deadline:
                return
            text = (
                f"nothing was heard of its grammar for {LIMIT_SECONDS:g} s; make the schema smaller"
            )
            self._note(Settled(sequence, error=text))

    def _take(self, sequence: Sequence, state: GrammarState) -> None:
        if state.is_ruling:
            token = sequence.token_ids[-1]
            self._submit(self._matcher, sequence, lambda: state.advance(token))
            return
        which = state.started_by(sequence.token_ids, sequence.num_prompt_tokens)
        if which is not None:
            self._begin(sequence, state, which)

    def _begin(self, sequence: Sequence, state: GrammarState, which: int) -> None:
        state.is_ruling = True
        sequence.hold()
        self._submit(self._matcher, sequence, lambda: state.begin(which))

    def _resume(self, sequence: Sequence, mask: bytes | None) -> None:
        """Let a sequence go on with a mask or, where its grammar is complete, freely or under another grammar."""
        state = sequence.grammar
        assert state is not None, "results are of constrained sequences"
        if mask is None:
            state.is_ruling = False
            which = state.started_by(sequence.token_ids, sequence.num_prompt_tokens)
            if which is not None:
                self._begin(sequence, state, which)
                return
        state.set_mask(state.free_mask if mask is None else mask)
        sequence.is_held = False

    def _submit(
        self, thread: MatcherThread, sequence: Sequence, find: Callable[[], Matcher | None]
    ) -> None:
        self._due[sequence] = time.monotonic() + LIMIT_SECONDS
        self._num_masks += sequence.is_held
        thread.put(Job(sequence, find))
