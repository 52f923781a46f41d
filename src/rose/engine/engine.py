"""The engine: requests in, events out, one step at a time. Token ids only; it knows no text.

What happens in one step is in `_step_in_turn` (plan, launch, collect, commit) and, for devices that work
while the host plans, in `_step_overlapped`. Both give the same tokens; `EngineConfig.overlap` says which one runs.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rose.cache.table import PageTable
from rose.config.engine import EngineConfig
from rose.config.quant import QuantConfig
from rose.decoders.base import Decoder, step
from rose.decoders.build import BuiltDecoder, build_decoder, load_decoder
from rose.engine.admission import (
    duplicate_id,
    not_by_priority,
    queue_full,
    refusal,
    timed_out,
)
from rose.engine.clock import FIRST_SECONDS, StepClock
from rose.engine.commit import commit, finished
from rose.engine.grammars import Grammars
from rose.engine.metrics import Counters
from rose.engine.scheduler import Scheduler
from rose.engine.sequence import Sequence, SequenceState
from rose.protocol.event import (
    EngineStatus,
    ErrorEvent,
    FinishedEvent,
    FinishReason,
    FromEngine,
    TokenLogprobs,
    TokensEvent,
)
from rose.protocol.grammar import Constraint, Vocabulary
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams
from rose.runtime.plan import StepPlan, StepResult
from rose.utils.device import detect
from rose.utils.errors import ConfigError, RoseError
from rose.utils.log import get_logger
from rose.utils.threads import fit_threads

MEASURED_TOKENS = 60

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What requests are held to, and the name they are told."""

    model: str
    context_tokens: int
    vocab_size: int


@dataclass(slots=True, kw_only=True)
class Generation:
    """The whole output of one request."""

    token_ids: list[int]
    reason: FinishReason | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token, where the request asked for them."""


class RequestRefused(RoseError):
    """`generate` was given a request that the engine does not take, or could not end."""


class LLMEngine:
    """Owns the sequences; drives scheduler and decoder."""

    def __init__(
        self,
        scheduler: Scheduler,
        decoder: Decoder,
        limits: EngineLimits,
        *,
        is_overlapped: bool,
        seed: int = 0,
    ) -> None:
        assert decoder.can_overlap or not is_overlapped, "this decoder cannot run overlapped"
        self.scheduler = scheduler
        self.decoder = decoder
        self.limits = limits
        self.counters = Counters()
        self.clock = StepClock()
        self.start_s = 0.0
        """How long it took to build; set by who knows."""
        self.quant: QuantConfig | None = None
        """Formats of the model, resolved; set by who knows."""
        self.count_late_kernels: Callable[[], int] = int  # 0
        """Return how many kernels were compiled while serving; set by who knows."""
        self.on_begin: Callable[[], None] = _do_nothing
        """Called when a step is about to be launched; `clock.bound_s` says how long that may take."""
        self.step = self._step_overlapped if is_overlapped else self._step_in_turn
        """Run one step and return its events; without work it returns none."""
        self._sequences: dict[str, Sequence] = {}
        self._deadlines: list[tuple[float, str]] = []
        self.grammars = Grammars(limits.vocab_size)
        self._handles: deque[Any] = deque()
        self._seeds = random.Random(seed)  # seeds of requests, nothing secret

    @classmethod
    def from_model(
        cls,
        model: Any,
        config: EngineConfig,
        *,
        is_overlapped: bool | None = None,
        report: Callable[[str], None] = _logger.info,
    ) -> LLMEngine:
        """Build an engine around a model (a CausalLM) whose parameters are on the device already.

        Units    is_overlapped None: as the configuration says (`overlap`)
        Raises   ConfigError
        """
        device = detect(config.device)
        config = config.resolve(device, checkpoint_format="bf16")
        built = build_decoder(model, config, device, report)
        return cls._from_decoder(built, is_overlapped)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        is_overlapped: bool | None = None,
        report: Callable[[str], None] = _logger.info,
    ) -> LLMEngine:
        """Load a checkpoint and build an engine around it; arguments as in `from_model`.

        On a CPU a small model leaves the process one thread of torch's (`utils.threads`), which is logged; whoever
        computes more in the same process can set another number afterwards.

        Raises   ConfigError, CheckpointError
        """
        device = detect(config.device)
        engine = cls._from_decoder(load_decoder(config, device, report), is_overlapped)
        fit_threads(engine.model.weight_bytes, device)
        return engine

    @classmethod
    def _from_decoder(cls, built: BuiltDecoder, is_overlapped: bool | None) -> LLMEngine:
        for line in built.lines():
            _logger.info("%s", line)
        if is_overlapped is None:
            is_overlapped = _is_overlapped(built)
        table = PageTable(
            built.assembly.layout,
            built.assembly.memory.num_pages,
            is_caching=built.config.cache.prefix_cache,
        )
        limits = EngineLimits(
            model=built.config.model,
            context_tokens=built.assembly.context_tokens,
            vocab_size=built.vocab_size,
        )
        engine = cls(
            Scheduler(built.config.scheduler, table),
            built.decoder,
            limits,
            is_overlapped=is_overlapped,
            seed=built.config.seed,
        )
        engine.quant = built.config.quant
        late = built.assembly.late_kernels
        engine.count_late_kernels = lambda: late.num
        if built.assembly.device.kind == "cuda":
            engine.clock.first_s = FIRST_SECONDS
        return engine

    @property
    def model(self) -> Any:
        """Return the model that the decoder runs."""
        return self.decoder.model

    @property
    def table(self) -> PageTable:
        """Return the pages of all sequences."""
        return self.scheduler.table

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work or self.grammars.is_busy

    def learn(self, vocabulary: Vocabulary) -> None:
        """Get to know the tokens that grammars of later requests are written for."""
        self.grammars.learn(vocabulary)

    def add(self, request: Request) -> list[FromEngine]:
        """Queue a request; the events are a refusal, or none yet."""
        error = self._refusal(request)
        if error is not None:
            return [error]
        sampling = request.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._seeds.getrandbits(63))
        sequence = Sequence(request, sampling)
        self._sequences[request.request_id] = sequence
        if sequence.deadline is not None:
            self._note_deadline(sequence)
        if request.constraint is not None:
            self.grammars.open(sequence, request.constraint)
        else:
            self.scheduler.add(sequence)
        return []

    def abort(self, request_id: str) -> list[FromEngine]:
        """End a request now; its pages are free for the next step. Unknown ids are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return []
        self._end(sequence)
        self.counters.num_aborted += 1
        return [finished(sequence, "abort")]

    def expire(self) -> list[FromEngine]:
        """End the requests whose time is up, waiting or running; to be called between steps."""
        events: list[FromEngine] = []
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            sequence = self._sequences.get(request_id)
            # Ended before, and perhaps another request has its id now.
            if sequence is None or sequence.deadline != deadline:
                continue
            found = (
                f"had {sequence.num_output_tokens} tokens generated"
                if sequence.has_started
                else f"was still waiting behind others ({len(self.scheduler.waiting)} wait)"
            )
            self._end(self._sequences.pop(request_id))
            self.counters.num_expired += 1
            events.append(timed_out(request_id, sequence.timeout_s, found))
        return events

    def _note_deadline(self, sequence: Sequence) -> None:
        if len(self._deadlines) > 2 * len(self._sequences) + 64:
            # Most are of requests that ended in time: keep those that still matter.
            self._deadlines = [
                (s.deadline, name) for name, s in self._sequences.items() if s.deadline is not None
            ]
            heapq.heapify(self._deadlines)
        else:
            assert sequence.deadline is not None, "only called for one that has a deadline"
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.request_id))

    def running_ids(self) -> list[str]:
        """Return the ids of all requests that have not ended, waiting ones included."""
        return list(self._sequences)

    def has_begun(self, request_id: str) -> bool:
        """Whether tokens of a running request have been given out."""
        return self._sequences[request_id].num_output_tokens > 0

    def measure_steps(self) -> None:
        """Run a short request so that `clock` knows this machine; counts nothing and leaves no page behind.

        Raises  RequestRefused where even that fails: the model's logits are not finite
        """
        # Prompt and answer end before a page is full, so that the prefix cache gets none.
        longest = min(self.table.max_tokens, self.limits.context_tokens)
        most = min(self.table.layout.page_tokens, longest)
        num_tokens = max(1, min(MEASURED_TOKENS, most - 4))
        sampling = SamplingParams(temperature=0.0)
        request = Request(
            request_id="measure",
            prompt_token_ids=[0] * num_tokens,
            max_tokens=min(3, most - num_tokens),
            sampling=sampling,
            cache_salt="measure",
        )
        self.generate([request])
        self.counters = Counters()
        self.scheduler.num_queried_tokens = 0

    def status(self, detail: str = "", *, is_ready: bool = True) -> EngineStatus:
        """Return the engine's state for the frontend."""
        window = self.table.pools.get("window")
        return EngineStatus(
            is_ready=is_ready,
            model=self.limits.model,
            context_tokens=min(self.limits.context_tokens, self.table.max_tokens),
            vocab_size=self.limits.vocab_size,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_pages_used=self.table.num_used_pages,
            kv_pages_total=self.table.num_pages,
            weights_format="" if self.quant is None else self.quant.weights,
            kv_format="" if self.quant is None else self.quant.kv,
            kv_pages_idle=self.table.num_idle_pages,
            num_evicted_pages=self.table.num_evictions,
            num_steps=self.counters.num_steps,
            num_prompt_tokens=self.counters.num_prompt_tokens,
            num_cached_tokens=self.scheduler.num_cached_tokens,
            num_output_tokens=self.counters.num_output_tokens,
            num_waiting_tokens=self.scheduler.waiting.num_tokens,
            window_pages_used=0 if window is None else window.num_used,
            window_pages_total=0 if window is None else window.num_pages,
            num_queried_tokens=self.scheduler.num_queried_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_refused=self.counters.num_refused,
            num_expired=self.counters.num_expired,
            num_aborted=self.counters.num_aborted,
            num_grammar_failures=self.counters.num_grammar_failures,
            num_damaged=self.counters.num_damaged,
            num_late_kernels=self.count_late_kernels(),
            start_s=self.start_s,
            histograms={name: h.buckets() for name, h in self.counters.histograms.items()},
            step_bound_s=self.clock.bound_s,
            vocabularies=self.grammars.vocabularies,
            detail=detail,
        )

    def generate(self, requests: Iterable[Request]) -> list[Generation]:
        """Run requests to their end and return their outputs in order.

        Raises  RequestRefused for the first request that the engine does not take, or that fails on its way
        """
        waiting = deque(requests)
        outputs = {r.request_id: Generation(token_ids=[]) for r in waiting}
        events: list[FromEngine] = []
        while waiting or self.has_work:
            while waiting and self._no_room_for(waiting[0]) is None:
                events += self.add(waiting.popleft())
            events += self.expire() + self.step()
            for event in events:
                _collect(outputs, event)
            events.clear()
        return list(outputs.values())

    def _step_in_turn(self) -> list[FromEngine]:
        events = self._settle_grammars()
        plan = self.scheduler.schedule()
        if plan is None:
            self.grammars.wait_idle()
            return events
        self._begin(plan)
        return events + self._commit(step(self.decoder, plan))

    def _step_overlapped(self) -> list[FromEngine]:
        """Launch step n+1, then collect step n while the device works.

        Planning n+1 takes for granted that no sequence stops in n. One that does has a token of n+1 computed
        in vain, which commit drops. One that a grammar rules sits out a step, as its mask needs its last token.
        """
        if self._handles:
            self.grammars.wait_busy()
        events = self._settle_grammars()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._begin(plan)
            self._handles.append(self.decoder.launch(plan))
        num_to_keep = 0 if plan is None else 1
        if len(self._handles) > num_to_keep:
            return events + self._commit(self.decoder.collect(self._handles.popleft()))
        if plan is None:
            self.grammars.wait_idle()
        return events

    def _begin(self, plan: StepPlan) -> None:
        self.counters.count_step(plan)
        self.clock.begin(plan)
        self.on_begin()

    def _commit(self, result: StepResult) -> list[FromEngine]:
        flight = self.scheduler.flights.popleft()
        self.counters.count_step_end(flight.phase, self.clock.end())
        now = self.clock.last_end
        for sequence in flight.first_of:
            sequence.first_token_at = sequence.first_token_at or now
        events, ended = commit(self.scheduler, flight, result)
        if result.damaged_slots:
            self._note_damaged(events)
        if self.grammars.is_used:
            self.grammars.take(flight.sequences)
        if ended:
            self.counters.count_ends([self._sequences.pop(name) for name in ended], now)
        self.counters.num_output_tokens += sum(map(len, result.token_ids.values()))
        return events

    def _note_damaged(self, events: list[FromEngine]) -> None:
        """Forget, count and log the requests whose logits were not finite."""
        failed = [e for e in events if isinstance(e, ErrorEvent)]
        self.counters.num_damaged += len(failed)
        for error in failed:
            del self._sequences[error.request_id]
            _logger.error("request %s ends: %s", error.request_id, error.message)

    def _settle_grammars(self) -> list[FromEngine]:
        """Queue the requests whose grammars are built, let go on whose masks came, and end those that failed."""
        events: list[FromEngine] = []
        if not self.grammars.is_busy:
            return events
        for found in self.grammars.settle():
            sequence = found.sequence
            if found.error is None:
                self.counters.count_grammar(time.monotonic() - sequence.arrived_at)
                self.scheduler.add(sequence)
                continue
            self.counters.num_grammar_failures += 1
            del self._sequences[sequence.request_id]
            self._end(sequence)
            events.append(
                ErrorEvent(
                    request_id=sequence.request_id, code="grammar_failed", message=found.error
                )
            )
        return events

    def _end(self, sequence: Sequence) -> None:
        if sequence.grammar is not None and self.grammars.close(sequence):
            sequence.stop_running(SequenceState.FINISHED)
        else:
            self.scheduler.finish(sequence)

    def _refusal(self, request: Request) -> ErrorEvent | None:
        if request.request_id in self._sequences:
            return duplicate_id(request)
        error = refusal(
            request,
            context_tokens=self.limits.context_tokens,
            kv_tokens=self.table.max_tokens,
            vocab_size=self.limits.vocab_size,
        )
        if error is None and request.priority and self.scheduler.config.policy != "priority":
            return not_by_priority(request)
        if error is None and request.constraint is not None:
            error = self._grammar_refusal(request.request_id, request.constraint)
        found = self._no_room_for(request)
        if error is None and found is not None:
            self.counters.num_refused += 1
            return queue_full(request, found)
        return error

    def _no_room_for(self, request: Request) -> str | None:
        """Return why a request must be refused for now, or None."""
        queue, num_opening = self.scheduler.waiting, self.grammars.num_opening
        if num_opening and len(queue) + num_opening >= self.scheduler.config.max_waiting:
            return (
                f"{len(queue)} requests are waiting and {num_opening} have their grammars built, which is the most "
                "this server queues (scheduler.max_waiting)"
            )
        return queue.refusal(
            len(request.prompt_token_ids), num_opening_tokens=self.grammars.num_opening_tokens
        )

    def _grammar_refusal(self, request_id: str, constraint: Constraint) -> ErrorEvent | None:
        if self.grammars.knows(constraint):
            return None
        return ErrorEvent(
            request_id=request_id,
            code="grammar_failed",
            message=f"the request's grammars are written for vocabulary {constraint.vocabulary[:16]!r}, which this "
            "engine was not sent; send the vocabulary first",
        )


def _is_overlapped(built: BuiltDecoder) -> bool:
    """Return which of the two loops runs.

    Raises  ConfigError where the decoder cannot do what was asked
    """
    asked = built.config.overlap
    if asked and not built.decoder.can_overlap:
        raise ConfigError(
            f"overlap=True was asked for; the decoder {built.config.decoding.decoder!r} needs each step's tokens "
            "before the next is planned; change overlap to off or decoding.decoder to plain"
        )
    if asked is None:
        return built.assembly.device.kind == "cuda" and built.decoder.can_overlap
    return asked


def _collect(outputs: dict[str, Generation], event: FromEngine) -> None:
    if isinstance(event, TokensEvent):
        outputs[event.request_id].token_ids += event.token_ids
        outputs[event.request_id].logprobs += event.logprobs or []
        outputs[event.request_id].num_cached_tokens += event.num_cached_tokens
    elif isinstance(event, FinishedEvent):
        outputs[event.request_id].reason = event.reason
    elif isinstance(event, ErrorEvent):
        raise RequestRefused(f"{event.request_id}: {event.message}")


def _do_nothing() -> None:
    return
