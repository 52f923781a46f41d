"""Which tokens may come next where a grammar rules: matchers on threads of their own, beside the device's work.

The engine's loop hands over what was sampled and goes on; packed bits come back some tens of microseconds later, and
only the sequence they belong to waits for them. Tokens and grammar texts only: what they spell is the frontend's
business. docs/grammars.md tells the whole way.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rose.engine.grammar_state import GrammarState
from rose.engine.matchers import TokenTrie
from rose.engine.sequence import Sequence, SequenceState
from rose.protocol.grammar import Constraint, Vocabulary
from rose.utils.errors import RoseError
from rose.utils.log import get_logger

MAX_VOCABULARIES = 4
"""Kept; one takes about 60 MB for 200,000 tokens, and frontends of one model share one."""
WAIT_SECONDS = 0.02
"""Longest wait for a mask where nothing else can run; messages are read in between."""

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Settled:
    """What a thread found: a mask for the sequence's next token, the grammar's end (None), or an error."""

    sequence: Sequence
    mask: bytes | None = None
    error: str | None = None


class Grammars:
    """All grammars of one engine; its methods are for the engine's thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tries: OrderedDict[str, TokenTrie] = OrderedDict()
        self._results: queue.SimpleQueue[Settled] = queue.SimpleQueue()
        self._early: list[Settled] = []
        self._num_pending = 0
        self._opening: dict[str, Sequence] = {}
        self._is_used = False
        # Two threads, so that a large grammar of one request holds up no token of another.
        self._builder = _Worker("grammar-builder")
        self._matcher = _Worker("grammar-matcher")

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
        return self._num_pending > 0 or bool(self._early)

    @property
    def num_opening(self) -> int:
        """Return how many requests wait for their grammars to be built."""
        return len(self._opening)

    def learn(self, vocabulary: Vocabulary) -> None:
        """Get to know a vocabulary; building it takes most of a second for 200,000 tokens, once."""
        if vocabulary.key in self._tries:
            return
        trie = TokenTrie(vocabulary, self._vocab_size)
        self._tries[vocabulary.key] = trie
        while len(self._tries) > MAX_VOCABULARIES:
            self._tries.popitem(last=False)
        self._builder.put(trie.build)

    def knows(self, constraint: Constraint) -> bool:
        """Tell whether the vocabulary of a constraint is there."""
        return constraint.vocabulary in self._tries

    def open(self, sequence: Sequence, constraint: Constraint) -> None:
        """Begin to build the grammars of a new sequence; `settle` says when it may be queued."""
        state = GrammarState(constraint, self._tries[constraint.vocabulary])
        sequence.grammar, self._is_used = state, True
        state.num_seen = len(sequence.token_ids)
        first = state.started_by([])
        state.is_ruling = first is not None
        self._opening[sequence.request_id] = sequence
        self._submit(self._builder, sequence, lambda: _open(state, first))

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
        while self._early or not self._results.empty():
            found = self._early.pop() if self._early else self._results.get()
            self._num_pending -= 1
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

    def wait(self) -> None:
        """Wait a moment for a result, where nothing else can be done."""
        if self._num_pending and not self._early:
            try:
                self._early.append(self._results.get(timeout=WAIT_SECONDS))
            except queue.Empty:
                return

    def _take(self, sequence: Sequence, state: GrammarState) -> None:
        if state.is_ruling:
            token = sequence.token_ids[-1]
            self._submit(self._matcher, sequence, lambda: _advance(state, token))
            return
        which = state.started_by(sequence.token_ids[sequence.num_prompt_tokens :])
        if which is not None:
            self._begin(sequence, state, which)

    def _begin(self, sequence: Sequence, state: GrammarState, which: int) -> None:
        state.is_ruling = True
        sequence.hold()
        self._submit(self._matcher, sequence, lambda: _begin(state, which))

    def _resume(self, sequence: Sequence, mask: bytes | None) -> None:
        """Let a sequence go on with a mask or, where its grammar is complete, freely or under another grammar."""
        state = sequence.grammar
        assert state is not None, "results are of constrained sequences"
        if mask is None:
            state.is_ruling = False
            which = state.started_by(sequence.token_ids[sequence.num_prompt_tokens :])
            if which is not None:
                self._begin(sequence, state, which)
                return
        state.set_mask(state.free_mask if mask is None else mask)
        sequence.is_held = False

    def _submit(
        self, worker: _Worker, sequence: Sequence, work: Callable[[], bytes | None]
    ) -> None:
        results = self._results

        def run() -> None:
            try:
                results.put(Settled(sequence, work()))
            except RoseError as error:
                results.put(Settled(sequence, error=str(error)))
            except Exception as error:
                # A bug or a broken library must not leave its client waiting for ever.
                _logger.exception("the grammar of %s failed", sequence.request_id)
                results.put(Settled(sequence, error=f"{type(error).__name__}: {error}"))

        self._num_pending += 1
        worker.put(run)


class _Worker:
    """A thread that runs what it is given, in order; started with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: Callable[[], Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            self._jobs.get()()


def _open(state: GrammarState, first: int | None) -> bytes | None:
    """Build every grammar, so that errors come before the first token; return the first mask, None if all is free."""
    for grammar in state.constraint.grammars:
        state.trie.prepare(grammar.text)
    return None if first is None else _begin(state, first)


def _begin(state: GrammarState, which: int) -> bytes | None:
    state.matcher = state.trie.matcher(state.constraint.grammars[which].text)
    return state.matcher.mask()


def _advance(state: GrammarState, token: int) -> bytes | None:
    assert state.matcher is not None, "a grammar rules"
    return state.matcher.advance(token)
