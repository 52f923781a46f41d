"""One token per sequence and step, sampled from the model's logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rose.decoders.results import ResultRing, Sampled, StepHandle
from rose.kernels.registry import KernelRow
from rose.runtime.graphs import DecodeGraphs
from rose.runtime.inputs import StepInputs
from rose.runtime.plan import PlanEntry, StepPlan, StepResult
from rose.runtime.runner import ModelRunner
from rose.runtime.warm_up import warm_up_steps
from rose.sampling.batch import SampleFlavour, SlotFlavours
from rose.sampling.logprobs import logprobs
from rose.sampling.sampler import Sampler
from rose.sampling.transforms import adjusted


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
        # Kernels are compiled by launch shape, and a shape follows from the bound on lengths: on a GPU steps outside of
        # graphs take that of the graphs, and with it their kernels. On a CPU the bound is work.
        is_cpu = runner.tables.device.type == "cpu"
        self._longest = None if is_cpu else max(graph_max_lengths)
        self._flavours = SlotFlavours()
        self.graphs = (
            DecodeGraphs(self._decode_step, max_rows=num_slots, max_lengths=graph_max_lengths)
            if use_graphs
            else None
        )

    def launch(self, plan: StepPlan) -> StepHandle:
        """See Decoder."""
        for entry in plan.prefill:
            if entry.sampling is not None:
                self._take_slot(entry)
        if plan.masks:
            self._write_masks(plan.masks)
        flavour = self._flavours.of(plan.sample_slots)
        if plan.prefill:
            sampled = self._mixed_step(plan, flavour)
        else:
            sampled = self._launch_decode(plan, flavour)
        # copied: the slot may have another sequence before this step is collected
        num_top = dict(self._flavours.logprobs) if flavour.is_extended else {}
        return self._results.send(plan.step, plan.sample_slots, sampled, num_top)

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
            has_graphs=self.graphs is not None,
        )
        for plan in steps:
            report(f"warming up: a step of {plan.num_tokens} tokens")
            self.collect(self.launch(plan))
        self._tables.masks.warm_up()
        if self.graphs is not None:
            self.graphs.capture_all(self._send_padding, report)

    def kernel_table(self) -> list[KernelRow]:
        """See Decoder."""
        return [
            *self._tables.kernel_table(),
            *self.model.kernel_table(),
            *self._sampler.kernel_table(),
        ]

    @torch.inference_mode()
    def _take_slot(self, entry: PlanEntry) -> None:
        """Set what of sampling the device keeps by slot beside numbers: nothing, for nearly every request."""
        assert entry.sampling is not None, "the entry takes no slot"
        if entry.slot in self._flavours.masked:
            self._write_masks({entry.slot: None})
        was_adjusted = entry.slot in self._flavours.adjusted
        self._flavours.take(entry.slot, entry.sampling)
        if entry.history is not None:
            self._tables.adjustments.write(
                entry.slot,
                entry.sampling,
                prompt_ids=entry.history.prompt_ids,
                output_ids=entry.history.output_ids,
                stop_ids=entry.history.stop_ids,
            )
        elif was_adjusted:
            self._tables.adjustments.reset(entry.slot)

    @torch.inference_mode()
    def _write_masks(self, masks: Mapping[int, bytes | None]) -> None:
        """Set which tokens slots may sample, before the step that samples them."""
        self._tables.masks.write(masks)
        for slot, mask in masks.items():
            change = self._flavours.masked.discard if mask is None else self._flavours.masked.add
            change(slot)

    def _launch_decode(self, plan: StepPlan, flavour: SampleFlavour) -> Sampled:
        num_rows = len(plan.decode)
        if self.graphs is None:
            self._tables.send_decode(plan, num_rows)
            return self._decode_step(num_rows, self._longest or plan.max_length, flavour)
        num_rows = self.graphs.bucket(num_rows)
        self.graphs.ensure(num_rows, plan.max_length, flavour, self._send_padding)
        self._tables.send_decode(plan, num_rows)
        return self.graphs.replay(num_rows, plan.max_length, flavour)

    @torch.inference_mode()
    def _decode_step(self, num_rows: int, max_length: int, flavour: SampleFlavour) -> Sampled:
        """Run the decode step that was sent; reads and writes device memory only, so it can be captured."""
        inputs, logits_SV = self.runner.forward_decode(num_rows, max_length)
        return self._sample(inputs, logits_SV, flavour)

    @torch.inference_mode()
    def _mixed_step(self, plan: StepPlan, flavour: SampleFlavour) -> Sampled | None:
        inputs, logits_SV = self.runner.forward(plan, max_length=self._longest)
        return None if logits_SV is None else self._sample(inputs, logits_SV, flavour)

    def _sample(self, inputs: StepInputs, logits_SV: Tensor, flavour: SampleFlavour) -> Sampled:
        slots_S, raw_SV = inputs.slots_S, logits_SV[:, : self.model.config.vocab_size]
        if flavour.is_extended:
            rows = self._tables.adjustments.gather(slots_S, inputs.positions_S)
            logits_SV = adjusted(raw_SV, rows)
        if flavour.is_masked:
            self._tables.masks.apply(logits_SV, slots_S, phase=inputs.context.phase)
        tokens_S = self._sampler.sample(
            logits_SV,
            inputs.sampling,
            inputs.positions_S,
            phase=inputs.context.phase,
            is_filtered=flavour.is_filtered,
        )
        self._tables.keep_tokens(slots_S, tokens_S)
        if not flavour.is_extended:
            return Sampled(tokens_S)
        self._tables.adjustments.count(slots_S, tokens_S)
        return Sampled(tokens_S, logprobs(raw_SV, tokens_S))

    def _send_padding(self, num_rows: int) -> None:
        empty = StepPlan(step=-1, decode=[], prefill=[], sample_slots=[], max_length=0)
        self._tables.send_decode(empty, num_rows)
