"""One token per sequence and step, sampled from the model's logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rose.decoders.results import ResultRing, StepHandle
from rose.runtime.graphs import DecodeGraphs
from rose.runtime.inputs import StepInputs
from rose.runtime.plan import StepPlan, StepResult
from rose.runtime.runner import ModelRunner
from rose.runtime.warm_up import warm_up_steps
from rose.sampling.batch import is_filtered
from rose.sampling.sampler import Sampler


class PlainDecoder:
    """Forward, sample, keep the token on the device for the next step."""

    can_overlap = True

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        *,
        use_graphs: bool,
        graph_max_lengths: tuple[int, ...],
    ) -> None:
        self.runner = runner
        self.model = runner.model
        self._sampler = sampler
        self._tables = runner.tables
        num_slots = runner.tables.padding_slot
        self._results = ResultRing(num_slots, runner.tables.device)
        self._filtered_slots: set[int] = set()
        self.graphs = (
            DecodeGraphs(self._decode_step, max_rows=num_slots, max_lengths=graph_max_lengths)
            if use_graphs
            else None
        )

    def launch(self, plan: StepPlan) -> StepHandle:
        """See Decoder."""
        for entry in plan.prefill:
            if entry.sampling is not None:
                change = set.add if is_filtered(entry.sampling) else set.discard
                change(self._filtered_slots, entry.slot)
        filtered = not self._filtered_slots.isdisjoint(plan.sample_slots)
        if plan.prefill:
            tokens_S = self._mixed_step(plan, filtered)
        else:
            tokens_S = self._launch_decode(plan, filtered)
        return self._results.send(plan.step, plan.sample_slots, tokens_S)

    def collect(self, handle: StepHandle) -> StepResult:
        """See Decoder."""
        return self._results.receive(handle)

    def warm_up(self, report: Callable[[str], None]) -> None:
        """See Decoder. On a CPU nothing is compiled, so there is nothing to do."""
        if self._tables.device.type == "cpu":
            return
        steps = warm_up_steps(
            self._tables.layout,
            num_pages=min(pages.shape[0] for pages in self.runner.kv_pages),
            num_slots=self._tables.padding_slot,
            max_tokens=min(self._tables.max_step_tokens, self._tables.context_tokens - 1),
        )
        for plan in steps:
            report(f"warming up: a step of {plan.num_tokens} tokens")
            self.collect(self.launch(plan))
        if self.graphs is not None:
            self.graphs.capture_all(self._send_padding, report)

    def kernel_table(self) -> list[tuple[str, str, str]]:
        """See Decoder."""
        return [
            *self._tables.kernel_table(),
            *self.model.kernel_table(),
            *self._sampler.kernel_table(),
        ]

    def _launch_decode(self, plan: StepPlan, filtered: bool) -> Tensor:
        num_rows = len(plan.decode)
        if self.graphs is None:
            self._tables.send_decode(plan, num_rows)
            return self._decode_step(num_rows, plan.max_length, filtered)
        num_rows = self.graphs.bucket(num_rows)
        self._tables.send_decode(plan, num_rows)
        return self.graphs.replay(num_rows, plan.max_length, is_filtered=filtered)

    @torch.inference_mode()
    def _decode_step(self, num_rows: int, max_length: int, filtered: bool) -> Tensor:
        """Run the decode step that was sent; reads and writes device memory only, so it can be captured."""
        inputs, logits_SV = self.runner.forward_decode(num_rows, max_length)
        return self._sample(inputs, logits_SV, filtered)

    @torch.inference_mode()
    def _mixed_step(self, plan: StepPlan, filtered: bool) -> Tensor | None:
        inputs, logits_SV = self.runner.forward(plan)
        return None if logits_SV is None else self._sample(inputs, logits_SV, filtered)

    def _sample(self, inputs: StepInputs, logits_SV: Tensor, filtered: bool) -> Tensor:
        tokens_S = self._sampler.sample(
            logits_SV,
            inputs.sampling,
            inputs.positions_S,
            phase=inputs.context.phase,
            is_filtered=filtered,
        )
        self._tables.keep_tokens(inputs.slots_S, tokens_S)
        return tokens_S

    def _send_padding(self, num_rows: int) -> None:
        empty = StepPlan(step=-1, decode=[], prefill=[], sample_slots=[], max_length=0)
        self._tables.send_decode(empty, num_rows)
