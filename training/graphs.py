"""Steps recorded once as CUDA graphs and replayed, so that the host launches one graph and not a thousand kernels.

A part of the training has a few forms of its step (plain, experts rounded, ...), each recorded by itself. A recorded
step is used only after replays of it, on other batches and at other rates than it was recorded with, moved the
parameters as steps do that are not recorded. It knows neither model nor data: a step is a function of form and batch.
"""

import contextlib
import gc
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from batches import Fixed, Tensors
from packing import Batch
from torch import Tensor, nn

FLOOR = 0.02
"""Relative difference of all moves together that is left alone. Replays run the kernels of other steps; what differs
are sums by atomics, in float32, and now and then the bf16 number that such a sum is rounded to, by 0.4 % at most."""
MOST = 0.25
"""Difference that is never left alone, however much two steps that are not recorded differ. A stale batch, a rate that
stays or a state that is lost moves parameters elsewhere: 0.3 and more, mostly above 1."""
SPREADS = 4.0
"""Times the difference of two walks that are not recorded, which shows what atomics make of one on this device."""
MOST_OF_ONE = 0.9
"""Of each parameter by itself; one that is not moved, or moved twice, differs by 1. Some have eight numbers, and AdamW
moves a number whose gradient is next to nothing by the whole rate, up or down: 0.7, if one of eight turns round."""
LOSS = 5e-3
"""Nats. The first loss is that of the same weights; the second follows a step that differs as told above."""
FACTORS = (0.05, 0.1)
"""Of the rates in the two steps that are compared; recorded with another."""
RECORDED_FACTOR = 0.2
WARM_STEPS = 2
"""Steps before recording: the first compiles, the second finds all compiled and its kernels loaded."""


class Form(NamedTuple):
    """What kind of step it is; each kind is recorded by itself."""

    is_rounded: bool
    """Experts pass through the rounding to MXFP4."""
    has_head: bool = False
    """The MTP head learns too."""

    @property
    def name(self) -> str:
        """Return it in words."""
        return ("rounded" if self.is_rounded else "plain") + (" with head" if self.has_head else "")


class Graph(Protocol):
    """Work of the device, recorded."""

    def record(self, work: Callable[[], tuple[Tensor, ...]]) -> None:
        """Record what `work` would do, which is not done."""
        ...

    def replay(self) -> tuple[Tensor, ...]:
        """Do it; return what `work` returned: the same tensors each time, overwritten by the next replay."""
        ...


class Recorder(Protocol):
    """Makes graphs, and has what all work of a training shares with them."""

    def working(self) -> contextlib.AbstractContextManager[None]:
        """Hold all work between as one queue; it is done at the end."""
        ...

    def refusing_to_wait(self) -> contextlib.AbstractContextManager[None]:
        """Raise where the host would wait for the device."""
        ...

    def graph(self) -> Graph:
        """Return a graph with nothing in it."""
        ...


class CudaRecorder:
    """Graphs of CUDA.

    All work of a training is on the stream that records: the nodes that add up gradients keep the stream on which they
    were made, a recording that meets another stream fails, and what is in order on one stream needs no events. The
    graphs share memory: each writes all that it reads there, and only one runs at a time.
    """

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._made: list[CudaGraph] = []
        """HAZARD: torch's allocator still asks a graph whose recording failed, so none is dropped."""

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Make the stream the current one."""
        gc.collect()  # of what is left of other streams' backward passes
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def refusing_to_wait(self) -> Iterator[None]:
        """Use torch's own watch over calls that synchronise."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def graph(self) -> "CudaGraph":
        """Return a graph on this stream and in this memory."""
        if self._made and not self._made[-1].is_recorded:
            # Torch takes the memory of a recording that failed for one that is still recorded to.
            self._pool = torch.cuda.graph_pool_handle()
        self._made.append(CudaGraph(self._stream, self._pool))
        return self._made[-1]


class CudaGraph:
    """One of them."""

    def __init__(self, stream: torch.cuda.Stream, pool: "torch.cuda._POOL_HANDLE") -> None:
        self._graph, self._stream, self._pool = torch.cuda.CUDAGraph(), stream, pool
        self._found: tuple[Tensor, ...] = ()
        self.is_recorded = False

    def record(self, work: Callable[[], tuple[Tensor, ...]]) -> None:
        """Record on the stream."""
        with torch.cuda.graph(self._graph, pool=self._pool, stream=self._stream):
            self._found = work()
        self.is_recorded = True

    def replay(self) -> tuple[Tensor, ...]:
        """Launch on the current stream, and do not wait."""
        self._graph.replay()
        return self._found


class Kept:
    """Parameters and the state of their optimisers, as they were when this was made."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._parameters, self._optimizers = parameters, optimizers
        self._values = [p.detach().clone() for p in parameters]
        self._states = {key: state.clone() for key, state in self._found()}

    def _found(self) -> Iterator[tuple[tuple[int, int, str], Tensor]]:
        for i, optimizer in enumerate(self._optimizers):
            for j, parameter in enumerate(self._parameters):
                for name, state in optimizer.state.get(parameter, {}).items():
                    yield (i, j, name), state

    @torch.no_grad()
    def moves(self) -> list[Tensor]:
        """Return how far each parameter has moved since."""
        return [p - v for p, v in zip(self._parameters, self._values, strict=True)]

    @torch.no_grad()
    def restore(self) -> None:
        """Put all back, in place. State that has come since began as zeros, in AdamW and Muon alike."""
        for parameter, value in zip(self._parameters, self._values, strict=True):
            parameter.copy_(value)
        for key, state in self._found():
            if key in self._states:
                state.copy_(self._states[key])
            else:
                state.zero_()


@dataclass(frozen=True)
class Walk:
    """Two steps from the same state: how far each parameter moved, and the losses."""

    moves: list[Tensor]
    losses: Tensor
    """float32 [L]"""


def differences(wanted: Walk, found: Walk) -> tuple[float, Tensor, float]:
    """Return the relative difference of all moves together, that of each parameter [P], and the largest of losses.

    A parameter that neither walk moved differs by 0; not a number, or infinite, where a walk was not finite.
    """
    apart = torch.stack(
        [(a - b).float().norm() for a, b in zip(wanted.moves, found.moves, strict=True)]
    )
    far = torch.stack([a.float().norm() for a in wanted.moves])
    each = torch.where(apart == 0, apart, apart / far)
    return (
        float(apart.norm() / far.norm()),
        each,
        float((wanted.losses - found.losses).abs().max()),
    )


def compare(wanted: Walk, again: Walk, replayed: Walk, names: Sequence[str]) -> dict[str, object]:
    """Compare a replayed walk with two that were not; key `wrong` says what is beyond its limit, where something is."""
    spread, spread_of_each, spread_of_loss = differences(wanted, again)
    found, each, loss = differences(wanted, replayed)
    limit = min(max(FLOOR, SPREADS * spread), MOST)
    report: dict[str, object] = {
        "difference": found,
        "of_two_not_recorded": spread,
        "limit": limit,
        "loss_difference": loss,
        "furthest": float(each.max()),
    }
    is_off = ~(each <= torch.clamp(SPREADS * spread_of_each, min=MOST_OF_ONE))
    wrong = []
    if not spread <= MOST:
        wrong.append(f"steps that are not recorded differ by {spread} among themselves")
    if not found <= limit:
        wrong.append(f"all moves together differ by {found}, allowed {limit}")
    if bool(is_off.any()):
        off = [f"{names[i]} by {float(each[i])}" for i in is_off.nonzero().flatten().tolist()[:8]]
        wrong.append(f"moves differ: {', '.join(off)}; allowed {MOST_OF_ONE}")
    if not loss <= LOSS + SPREADS * spread_of_loss:
        wrong.append(f"losses differ by {loss} nats, allowed {LOSS}")
    if wrong:
        report["wrong"] = "; ".join(wrong)
    return report


@dataclass(frozen=True)
class Steps:
    """What a step of a part is."""

    work: Callable[[Form, Tensors], tuple[Tensor, ...]]
    """Take a step of a form on a batch; return the losses, each []. Reads its rates from tensors."""
    set_rates: Callable[[float], None]
    """Multiply the rates of all optimisers, written to those tensors."""
    named_parameters: list[tuple[str, nn.Parameter]]
    optimizers: list[torch.optim.Optimizer]


class Replays:
    """Recorded steps of one part."""

    def __init__(self, recorder: Recorder, fixed: Fixed, steps: Steps) -> None:
        self._recorder, self._fixed, self._steps = recorder, fixed, steps
        self._graphs: dict[Form, Graph] = {}
        self.counts: Counter[str] = Counter()
        """Steps that were replayed, and those that could not be, by the reason."""

    def take(self, form: Form, drawn: Batch) -> tuple[Tensor, ...] | None:
        """Replay a step; return its losses, or None where it is to be taken without a record."""
        if form not in self._graphs:
            self.counts["form_not_recorded"] += 1
            return None
        if not self._fixed.fill(drawn):
            self.counts["more_places_than_room"] += 1
            return None
        self.counts["replayed"] += 1
        return tuple(loss.clone() for loss in self._graphs[form].replay())

    def fits(self, drawn: Batch) -> bool:
        """Tell whether a batch has something to learn, and no more than there is room for."""
        return self._fixed.fill(drawn) and bool(self._fixed.tensors.weights_of_two.any())

    def prepare(self, form: Form, drawn: tuple[Batch, Batch]) -> dict[str, object]:
        """Record a form and compare; return a report, whose key `failed` or `wrong` says why the form is not used.

        Aliasing   parameters and the optimisers' state are left as they were
        """
        begin, report = time.perf_counter(), dict[str, object]()
        parameters = [p for _, p in self._steps.named_parameters]
        kept = Kept(parameters, self._steps.optimizers)
        try:
            report |= self._prepare(form, drawn, kept)
        except Exception:  # noqa: BLE001 - whatever a capture raises, steps that are not recorded may work
            report["failed"] = traceback.format_exc()[-4000:]
        finally:
            kept.restore()
            for parameter in parameters:
                parameter.grad = None
        if "failed" in report or "wrong" in report:
            self._graphs.pop(form, None)
        return report | {"s": round(time.perf_counter() - begin, 1)}

    def _prepare(self, form: Form, drawn: tuple[Batch, Batch], kept: Kept) -> dict[str, object]:
        def step() -> tuple[Tensor, ...]:
            return self._steps.work(form, self._fixed.tensors)

        report = self._warm(step, drawn[0])
        kept.restore()
        wanted, again = (self._walk(step, drawn, kept) for _ in range(2))
        self._steps.set_rates(RECORDED_FACTOR)
        graph = self._recorder.graph()
        graph.record(step)
        replayed = self._walk(graph.replay, drawn, kept)
        names = [name for name, _ in self._steps.named_parameters]
        self._graphs[form] = graph
        return report | compare(wanted, again, replayed, names)

    def _warm(self, step: Callable[[], tuple[Tensor, ...]], drawn: Batch) -> dict[str, object]:
        """Compile and load all that a step uses; report where the host waits, which a recording does not allow."""
        assert self._fixed.fill(drawn), "batches that fit are drawn before"
        self._steps.set_rates(RECORDED_FACTOR)
        for _ in range(WARM_STEPS):
            step()
        try:
            with self._recorder.refusing_to_wait():
                step()
        except Exception:  # noqa: BLE001 - recording tells in the end; this says in which line
            return {"host_waits": traceback.format_exc()[-2000:]}
        return {}

    def _walk(
        self,
        step: Callable[[], tuple[Tensor, ...]],
        drawn: tuple[Batch, Batch],
        kept: Kept,
    ) -> Walk:
        """Take two steps, the second batch first, and put all back."""
        losses: list[Tensor] = []
        for batch, factor in zip(reversed(drawn), FACTORS, strict=True):
            assert self._fixed.fill(batch), "batches that fit are drawn before"
            self._steps.set_rates(factor)
            losses += [loss.detach().clone() for loss in step()]
        walk = Walk(kept.moves(), torch.stack(losses).float())
        kept.restore()
        return walk
