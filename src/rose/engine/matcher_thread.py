"""A thread that follows grammars: jobs in, masks out, several at a time where several wait. Knows no scheduler."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rose.engine.matchers import GrammarError, Matcher, masks
from rose.engine.sequence import Sequence
from rose.utils.log import get_logger

MAX_JOBS = 256
"""Taken at once: as many as sequences run."""
MAX_EXECUTOR_THREADS = 8
"""Of the library, where several masks wait. A mask takes about 40 us, so 8 threads do 128 of them in under 1 ms."""

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be found for a sequence: its matcher at the next token; None: its grammars are built, none rules."""

    sequence: Sequence
    find: Callable[[], Matcher | None]


@dataclass(frozen=True, slots=True)
class Settled:
    """What was found: the mask of the sequence's next token, None where no grammar rules it (any more), or an error."""

    sequence: Sequence
    mask: bytes | None = None
    error: str | None = None


class MatcherThread:
    """Runs jobs in order; started with the first, and ended when nobody holds this object any more."""

    def __init__(self, name: str, results: queue.SimpleQueue[Settled]) -> None:
        self._name = name
        self._results = results
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Have a job done; its result comes in the queue."""
        if self._thread is None:
            worker = _Worker(self._jobs, self._results)  # knows nothing of this object
            self._thread = threading.Thread(target=worker.run, name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put(job)


class _Worker:
    """What the thread does."""

    def __init__(
        self, jobs: queue.SimpleQueue[Job | None], results: queue.SimpleQueue[Settled]
    ) -> None:
        self._jobs = jobs
        self._results = results
        self._executor: Any = None

    def run(self) -> None:
        """Do jobs until None comes, which is the last."""
        while (first := self._jobs.get()) is not None:
            jobs, job = [first], None
            while len(jobs) < MAX_JOBS and not self._jobs.empty():
                job = self._jobs.get()
                if job is None:
                    return
                jobs.append(job)
            self._do(jobs)
            del first, jobs, job  # with their sequences, while it waits

    def _do(self, jobs: list[Job]) -> None:
        """Find the matchers, then all masks side by side."""
        found: dict[int, list[tuple[Sequence, Matcher]]] = {}
        for job in jobs:
            matcher = self._tried(job.sequence, job.find)
            if isinstance(matcher, Matcher):
                found.setdefault(matcher.mask_bytes, []).append((job.sequence, matcher))
        for same_size in found.values():
            sequences, matchers = zip(*same_size, strict=True)
            results = masks(list(matchers), self._side_by_side() if len(matchers) > 1 else None)
            for sequence, result in zip(sequences, results, strict=True):
                is_mask = isinstance(result, bytes)
                settled = Settled(sequence, result) if is_mask else _failure(sequence, result)
                self._results.put(settled)

    def _tried(self, sequence: Sequence, find: Callable[[], Matcher | None]) -> Matcher | None:
        """Return the matcher of a job; where there is none to ask, its result is sent."""
        try:
            matcher = find()
        except Exception as error:  # noqa: BLE001 - a bug must not leave a client waiting for ever
            self._results.put(_failure(sequence, error))
            return None
        if matcher is not None and not matcher.is_complete:
            return matcher
        self._results.put(Settled(sequence))
        return None

    def _side_by_side(self) -> Any:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(min(MAX_EXECUTOR_THREADS, os.cpu_count() or 1))
        return self._executor


def _failure(sequence: Sequence, error: Exception) -> Settled:
    if isinstance(error, GrammarError):
        return Settled(sequence, error=str(error))
    _logger.error("the grammar of %s failed", sequence.request_id, exc_info=error)
    return Settled(sequence, error=f"{type(error).__name__}: {error}")
