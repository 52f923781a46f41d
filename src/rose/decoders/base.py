"""What the engine asks of a way to produce tokens. One file per way; the registry names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rose.kernels.registry import KernelRow
from rose.models.base import CausalLM
from rose.runtime.plan import StepPlan, StepResult


class Decoder(Protocol):
    """A step in two halves, so that the host can plan step n+1 while the device runs step n."""

    model: CausalLM
    """The model whose tokens these are."""
    can_overlap: bool
    """Whether step n+1 may be launched before step n is collected: only where every sequence gets exactly
    one token per step, since the host must know positions without knowing tokens."""

    def launch(self, plan: StepPlan) -> Any:
        """Enqueue a step and return at once with its handle.

        Raises   whatever the device or a kernel raises; the engine cannot go on after that
        Aliasing the plan may be reused by the caller as soon as this returns
        """
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for the tokens of a launched step; steps are collected in the order of their launch."""
        ...

    def warm_up(self, report: Callable[[str], None]) -> None:
        """Compile and capture what serving needs, telling `report` in words what is being done."""
        ...

    def kernel_table(self) -> list[KernelRow]:
        """Return lines for the start-up table, of the model and of the decoder's own kernels."""
        ...


def step(decoder: Decoder, plan: StepPlan) -> StepResult:
    """Run one step from start to end."""
    return decoder.collect(decoder.launch(plan))
