"""The scheduler by properties: any history of requests, aborts and steps, overlapped or not."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.pages import check_pages, check_written
from rose.cache.layout import CacheLayout, KindLayout
from rose.cache.table import PageTable
from rose.config.scheduler import SchedulerConfig
from rose.engine.commit import commit
from rose.engine.scheduler import Scheduler
from rose.engine.sequence import Sequence, SequenceState
from rose.protocol.event import FinishedEvent, TokensEvent
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams
from rose.runtime.plan import StepResult

PAGE, WINDOW_TOKENS = 4, 6


def _layout():
    sizes = {"page_tokens": PAGE, "num_kv_heads": 1, "head_dim": 2, "element": "float32"}
    full = KindLayout(kind="full", layers=(1,), window_tokens=None, **sizes)
    window = KindLayout(kind="window", layers=(0,), window_tokens=WINDOW_TOKENS, **sizes)
    return CacheLayout(kinds=(full, window), page_tokens=PAGE)


class World:
    """A scheduler with a device that remembers which token of which sequence it has seen."""

    def __init__(
        self,
        *,
        full=12,
        window=12,
        budget=8,
        mixed=6,
        sequences=3,
        is_overlapped=False,
        is_caching=False,
        policy="first-come",
    ):
        pages = {"full": full, "window": window}
        self.table = PageTable(_layout(), pages, is_caching=is_caching)
        self.contents = {kind: [[None] * PAGE for _ in range(n)] for kind, n in pages.items()}
        self.config = SchedulerConfig(
            max_step_tokens=budget, max_mixed_tokens=mixed, max_sequences=sequences, policy=policy
        )
        self.scheduler = Scheduler(self.config, self.table)
        self.lag = 1 if is_overlapped else 0
        self.sequences: dict[str, Sequence] = {}
        self.computed: dict[int, int] = {}
        self.events = []
        self.actions: set[tuple[str, str]] = set()
        self.admissions = []
        self.lengths: dict[int, dict[int, int]] = {}

    def add(self, prompt, output, stop_at=None, token=1, priority=0):
        name = f"r{len(self.sequences)}"
        request = Request(
            request_id=name,
            prompt_token_ids=[token] * prompt,
            max_tokens=output,
            stop_token_ids=[] if stop_at is None else [1000 + prompt + stop_at],
            priority=priority,
        )
        self.sequences[name] = Sequence(request, SamplingParams(seed=0))
        self.scheduler.add(self.sequences[name])
        return name

    def abort(self, name):
        self.actions.add(("abort", name))
        if self.sequences[name].state is not SequenceState.FINISHED:
            self.scheduler.finish(self.sequences[name])

    def step(self):
        plan = self.scheduler.schedule()
        self.check_order()
        if plan is not None:
            self.check_plan(plan)
        while len(self.scheduler.flights) > (self.lag if plan is not None else 0):
            flight = self.scheduler.flights.popleft()
            tokens = {slot: [self.token(flight, i)] for i, slot in enumerate(flight.slots)}
            result = StepResult(step=flight.step, token_ids=tokens)
            events, _ = commit(self.scheduler, flight, result)
            self.events += events
        self.check_pages()
        return plan

    def token(self, flight, i):
        """The sampled token says at which position it stands: 1000 + position."""
        return 1000 + self.lengths[flight.step][flight.slots[i]]

    def check_plan(self, plan):
        limit = self.config.max_mixed_tokens if plan.decode else self.config.max_step_tokens
        assert 1 <= plan.num_tokens <= limit
        entries = plan.decode + plan.prefill
        slots = [e.slot for e in entries]
        assert len(set(slots)) == len(slots) <= self.config.max_sequences
        self.lengths[plan.step] = {e.slot: e.start_position + e.num_tokens for e in entries}
        assert plan.max_length == max(self.lengths[plan.step].values())
        by_slot = {s.slot: s for s in self.scheduler.running}
        for entry in entries:
            if entry.is_new:
                # What a hit leaves out is whole pages, and never the last token.
                self.computed[entry.slot] = entry.start_position
                assert entry.start_position % PAGE == 0
                assert entry.start_position == 0 or self.table.is_caching
                assert entry.sampling is not None
                self.admissions.append(by_slot[entry.slot].request_id)
            assert entry.start_position == self.computed[entry.slot], (
                "a token is skipped or repeated"
            )
            self.computed[entry.slot] += entry.num_tokens
            sequence = by_slot[entry.slot]
            assert (entry.token_ids is None) == (entry in plan.decode)
            if entry.token_ids is not None:
                assert len(entry.token_ids) == entry.num_tokens >= 1
                end = entry.start_position + entry.num_tokens
                assert entry.token_ids == sequence.token_ids[entry.start_position : end]
            assert sequence.num_tokens <= sequence.max_length
            self.check_reach(sequence, entry)
            self.write_and_read(sequence, entry)
        sampling = [e.slot for e in plan.decode] + [e.slot for e in plan.prefill if e.is_last_chunk]
        assert plan.sample_slots == sampling

    def check_reach(self, sequence, entry):
        """Every page that the step reads or writes is held."""
        end = entry.start_position + entry.num_tokens
        for kind, columns in zip(self.table.layout.kinds, sequence.pages.columns, strict=True):
            first = kind.first_needed_column(entry.start_position)
            assert all(page >= 0 for page in columns[first : -(-end // PAGE)])
            assert len(columns) >= -(-end // PAGE)

    def write_and_read(self, sequence, entry):
        """Do to the pages what the device will do, and find there what the layers will look for."""
        check_written(self.table, sequence, entry)
        end = entry.start_position + entry.num_tokens
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        for kind, columns in zip(self.table.layout.kinds, sequence.pages.columns, strict=True):
            contents = self.contents[kind.kind]
            reach = 0 if kind.window_tokens is None else entry.start_position - kind.window_tokens
            for position in range(entry.start_position, end):
                value = prompt[position] if position < len(prompt) else 1000 + position
                contents[columns[position // PAGE]][position % PAGE] = value
            for position in range(max(0, reach + 1), end):
                value = prompt[position] if position < len(prompt) else 1000 + position
                assert contents[columns[position // PAGE]][position % PAGE] == value

    def check_order(self):
        """Nobody waits behind one with a later turn, and who runs is ordered as preemption needs it."""
        waiting = list(self.scheduler.waiting)
        running = self.scheduler.running
        for sequences in (waiting, running):
            orders = [s.order for s in sequences]
            assert orders == sorted(orders)
        assert self.scheduler.waiting.num_tokens == sum(s.num_tokens for s in waiting)
        if self.config.policy == "first-come" and waiting and running:
            assert running[-1].order < waiting[0].order

    def check_pages(self):
        running = self.scheduler.running
        check_pages(self.table, running)
        assert len({s.slot for s in running}) == len(running)

    def drain(self):
        """Run to the end; the bound holds even if only the oldest sequence ever goes on."""
        bound = 10 + 4 * sum(s.max_length for s in self.sequences.values())
        for _ in range(bound):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still work after {bound} steps: somebody starves")


actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(1, 30),
            st.integers(1, 18),
            st.one_of(st.none(), st.integers(0, 17)),
            st.integers(-2, 2),
        ),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    max_size=40,
)


def _play(world, history):
    for action, *values in history:
        if action == "add":
            *sizes, priority = values
            by_priority = world.config.policy == "priority"
            world.add(*sizes, token=1 + values[0] % 2, priority=priority if by_priority else 0)
        elif action == "abort" and world.sequences:
            world.abort(f"r{values[0] % len(world.sequences)}")
        elif action == "step":
            for _ in range(values[0]):
                world.step()
    world.drain()


worlds = {
    "history": actions,
    "is_overlapped": st.booleans(),
    "full": st.integers(12, 24),
    "window": st.integers(4, 14),
    "budget": st.integers(3, 20),
    "mixed": st.integers(3, 20),
    "is_caching": st.booleans(),
    "policy": st.sampled_from(["first-come", "priority"]),
}


def _check_history(history, **world_values):
    world = World(**world_values)
    _play(world, history)
    assert all(p.num_used == 0 for p in world.table.pools.values())
    assert all(s.state is SequenceState.FINISHED for s in world.sequences.values())
    assert sorted(world.scheduler._free_slots) == list(range(world.config.max_sequences))
    assert world.scheduler.waiting.num_tokens == 0
    for name, sequence in world.sequences.items():
        mine = [e for e in world.events if e.request_id == name]
        tokens = [t for e in mine if isinstance(e, TokensEvent) for t in e.token_ids]
        # The token at position p is 1000 + p: nothing is lost or doubled, preempted or not.
        start = 1000 + sequence.num_prompt_tokens
        assert tokens == list(range(start, start + len(tokens)))
        aborted = ("abort", name) in world.actions
        assert aborted or isinstance(mine[-1], FinishedEvent)


@settings(max_examples=150, deadline=None)
@given(**worlds)
def test_any_history_conserves_pages_and_ends_every_request(history, **world):
    _check_history(history, **world)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(**worlds)
def test_thousands_of_histories_leak_nothing(history, **world):
    _check_history(history, **world)


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None)
@given(history=actions, is_caching=st.booleans())
def test_thousands_of_histories_overlap_to_the_same_tokens(history, is_caching):
    _check_overlap(history, is_caching)


@settings(max_examples=60, deadline=None)
@given(history=actions, is_caching=st.booleans())
def test_overlapping_gives_the_same_tokens(history, is_caching):
    _check_overlap(history, is_caching)


def _check_overlap(history, is_caching):
    outputs = []
    for is_overlapped in (False, True):
        world = World(is_overlapped=is_overlapped, is_caching=is_caching)
        _play(world, [a for a in history if a[0] != "abort"])
        outputs.append({n: s.token_ids for n, s in world.sequences.items()})
        for name, sequence in world.sequences.items():
            mine = [e for e in world.events if e.request_id == name]
            tokens = [t for e in mine if isinstance(e, TokensEvent) for t in e.token_ids]
            assert tokens == sequence.token_ids[sequence.num_prompt_tokens :]
            # The token at position p is 1000 + p: nothing is lost or doubled by a preemption.
            start = 1000 + sequence.num_prompt_tokens
            assert tokens == list(range(start, start + len(tokens)))
            assert isinstance(mine[-1], FinishedEvent)
            assert mine[-1].num_output_tokens == len(tokens)
    assert outputs[0] == outputs[1]


def test_requests_enter_in_the_order_of_arrival():
    world = World(sequences=2)
    generator = random.Random(1)
    for _ in range(20):
        world.add(generator.randint(1, 30), generator.randint(1, 9))
    world.drain()
    first = list(dict.fromkeys(world.admissions))
    assert first == [f"r{i}" for i in range(20)]


def test_the_urgent_enter_first_and_give_way_last():
    world = World(full=12, window=12, budget=20, mixed=20, policy="priority")
    world.add(12, 20, priority=1)
    world.step()
    urgent = world.add(20, 20, priority=-1)
    world.add(4, 4, priority=0)
    world.drain()
    assert world.scheduler.num_preemptions >= 1
    assert world.admissions[:2] == ["r0", urgent]
    assert world.admissions.count(urgent) == 1
    assert world.admissions.count("r0") >= 2


def test_a_long_prompt_is_cut_and_mixed_with_decoding():
    world = World(full=40, window=40, budget=8, mixed=6)
    world.add(3, 20)
    world.step()
    world.add(30, 2)
    plans = [world.step() for _ in range(6)]
    assert all(len(p.decode) == 1 and p.prefill[0].num_tokens == 5 for p in plans)
    assert [p.prefill[0].is_last_chunk for p in plans] == [False] * 5 + [True]


def test_the_last_prompt_token_alone_in_a_chunk_is_not_taken_for_a_decode():
    world = World(budget=8)
    world.add(9, 2)
    world.step()
    plan = world.step()
    assert plan.decode == []
    assert plan.prefill[0].token_ids == [1]


def test_preemption_takes_the_youngest_and_recomputes_it():
    world = World(full=12, window=12, budget=20, mixed=20)
    world.add(20, 20)
    world.add(12, 20)
    world.drain()
    assert world.scheduler.num_preemptions >= 1
    assert world.admissions.count("r0") == 1
    assert world.admissions.count("r1") >= 2


def test_an_abort_frees_pages_at_once_and_its_token_in_flight_is_dropped():
    world = World(is_overlapped=True)
    name = world.add(5, 10)
    world.step()
    world.step()
    count = len(world.events)
    world.abort(name)
    assert world.table.pools["full"].num_used == 0
    world.drain()
    assert len(world.events) == count


def test_a_sequence_is_never_planned_past_its_limit_while_its_last_token_is_in_flight():
    world = World(is_overlapped=True)
    world.add(4, 2)
    steps = 0
    while world.scheduler.has_work:
        steps += world.step() is not None
    assert steps == 2


def test_the_scheduler_imports_no_torch():
    code = (
        "import sys, rose.engine.scheduler, rose.engine.commit; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
