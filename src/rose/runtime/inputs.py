"""StepPlan -> device tensors. What lives longer than a step is kept on the device, in tables by slot.

A decode step sends nothing but its slots and the few pages that are new: positions, lengths, last tokens,
page tables and sampling parameters are read by slot on the device, so the same code is captured in graphs.
A step with prompts in it sends all it needs in one copy. Knows neither models nor sampling rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rose.cache.layout import CacheLayout
from rose.layers.context import ForwardContext, KindContext
from rose.runtime.plan import PlanEntry, StepPlan
from rose.runtime.staging import StagingRing
from rose.sampling.batch import FLOATS, INTS, SamplingTable, pack
from rose.utils.math import ceil_div

_PACKED = INTS + FLOATS


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """One step as tensors.

    Shapes   T new tokens, S rows that sample
             token_ids_T int64;  slots_S int64 (the last slot: padding);  positions_S int64: index that the
             sampled token will have;  rows_S: rows of T that sample, None: all of them, in order
    """

    token_ids_T: Tensor
    context: ForwardContext
    slots_S: Tensor
    positions_S: Tensor
    rows_S: Tensor | None


class DeviceTables:
    """What the device knows of each slot, and how it learns of a step.

    Shapes   R slots plus one for padding, K layer kinds, P page-table columns
             pages_KRP int32;  lengths_R int32: tokens whose KV is written;  last_tokens_R int64
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_slots: int,
        context_tokens: int,
        max_step_tokens: int,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.device = device
        self.padding_slot = num_slots
        self._page_tokens = layout.page_tokens
        self._kind_index = {k.kind: i for i, k in enumerate(layout.kinds)}
        num_rows, num_kinds = num_slots + 1, len(layout.kinds)
        self._num_columns = ceil_div(context_tokens, layout.page_tokens)
        self.pages_KRP = torch.full(
            (num_kinds, num_rows, self._num_columns), -1, dtype=torch.int32, device=device
        )
        self.lengths_R = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.last_tokens_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.sampling = SamplingTable(num_rows, device)
        self._kind_strides = [k * num_rows * self._num_columns for k in range(num_kinds)]
        updates = num_kinds * (max_step_tokens // layout.page_tokens + 2 * num_rows)
        capacity = 3 * max_step_tokens + (6 + _PACKED) * num_rows + 2 * updates + 2
        self._ring = StagingRing(capacity, device)
        self._received = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._no_starts = torch.zeros(1, dtype=torch.int32, device=device)

    def send_decode(self, plan: StepPlan, num_rows: int) -> None:
        """Enqueue what the device does not know of a decode step: slots and new pages.

        Units    num_rows: rows of the batch, padding included
        """
        array = self._ring.next_array()
        num_real = len(plan.decode)
        array[:num_real] = plan.sample_slots
        array[num_real:num_rows] = self.padding_slot
        num_updates = len(self._kind_strides) * num_rows
        indices = array[num_rows : num_rows + num_updates]
        values = array[num_rows + num_updates : num_rows + 2 * num_updates]
        written = self._write_updates(plan.decode, indices, values)
        # Unused updates all hit the same cell of the padding slot, with the same value.
        indices[written:] = self.padding_slot * self._num_columns
        values[written:] = -1
        self._ring.send(num_rows + 2 * num_updates, self._received)

    def decode_inputs(self, num_rows: int, max_length: int, kv_pages: list[Tensor]) -> StepInputs:
        """Return the inputs of the decode step sent last, from device tables alone; graph-safe.

        Aliasing  advances lengths_R; applies the page updates
        """
        num_updates = len(self._kind_strides) * num_rows
        slots_S = self._received[:num_rows]
        indices = self._received[num_rows : num_rows + num_updates]
        values = self._received[num_rows + num_updates : num_rows + 2 * num_updates]
        self.pages_KRP.view(-1).index_copy_(0, indices, values.to(torch.int32))
        is_real_S = slots_S < self.padding_slot
        before_S = self.lengths_R.index_select(0, slots_S)
        lengths_S = (before_S + 1) * is_real_S
        self.lengths_R.index_copy_(0, slots_S, lengths_S)
        positions_S = before_S.to(torch.int64)
        columns_S, offsets_S = positions_S // self._page_tokens, positions_S % self._page_tokens
        kinds = {}
        for kind, k in self._kind_index.items():
            table_SP = self.pages_KRP[k].index_select(0, slots_S)
            page_S = table_SP.gather(1, columns_S[:, None]).view(-1).to(torch.int64)
            kv_slots_S = torch.where(is_real_S, page_S * self._page_tokens + offsets_S, -1)
            width = min(ceil_div(max_length, self._page_tokens), self._num_columns)
            kinds[kind] = KindContext(
                page_table_SP=table_SP[:, :width].contiguous(), slots_T=kv_slots_S
            )
        context = ForwardContext(
            phase="decode",
            num_tokens=num_rows,
            num_decode=num_rows,
            max_query_tokens=0,
            max_length=max_length,
            positions_T=positions_S,
            lengths_S=lengths_S,
            query_starts_N1=self._no_starts,
            kinds=kinds,
            kv_pages=kv_pages,
        )
        return StepInputs(
            token_ids_T=self.last_tokens_R.index_select(0, slots_S),
            context=context,
            slots_S=slots_S,
            positions_S=lengths_S.to(torch.int64),
            rows_S=None,
        )

    def mixed_inputs(self, plan: StepPlan, kv_pages: list[Tensor]) -> StepInputs:
        """Send a step with prompts in it and return its inputs.

        Aliasing  sets lengths_R and the rows of new slots; applies the page updates
        """
        sent = _MixedStep(self, plan)
        device_array = torch.empty(sent.num_elements, dtype=torch.int64, device=self.device)
        self._ring.send(sent.num_elements, device_array)
        parts = {name: device_array[a:b] for name, (a, b) in sent.sections.items()}
        self.pages_KRP.view(-1).index_copy_(0, parts["indices"], parts["values"].to(torch.int32))
        lengths_S = parts["lengths"].to(torch.int32)
        self.lengths_R.index_copy_(0, parts["slots"], lengths_S)
        if sent.num_new:
            self.sampling.write(parts["new_slots"], parts["packed"].view(_PACKED, sent.num_new))
        token_ids_T = parts["tokens"]
        num_decode = len(plan.decode)
        if num_decode:
            token_ids_T[:num_decode] = self.last_tokens_R.index_select(
                0, parts["slots"][:num_decode]
            )
        context = ForwardContext(
            phase="prefill",
            num_tokens=plan.num_tokens,
            num_decode=num_decode,
            max_query_tokens=max(e.num_tokens for e in plan.prefill),
            max_length=plan.max_length,
            positions_T=parts["positions"],
            lengths_S=lengths_S,
            query_starts_N1=parts["starts"].to(torch.int32),
            kinds=self._mixed_kinds(parts, plan.max_length),
            kv_pages=kv_pages,
        )
        return StepInputs(
            token_ids_T=token_ids_T,
            context=context,
            slots_S=parts["sample_slots"],
            positions_S=parts["sample_positions"],
            rows_S=parts["sample_rows"],
        )

    def _mixed_kinds(self, parts: dict[str, Tensor], max_length: int) -> dict[str, KindContext]:
        slots_S, positions_T = parts["slots"], parts["positions"]
        slot_T = slots_S.index_select(0, parts["sequences"])
        columns_T, offsets_T = positions_T // self._page_tokens, positions_T % self._page_tokens
        width = ceil_div(max_length, self._page_tokens)
        kinds = {}
        for kind, k in self._kind_index.items():
            page_T = self.pages_KRP[k][slot_T, columns_T].to(torch.int64)
            kinds[kind] = KindContext(
                page_table_SP=self.pages_KRP[k, :, :width].index_select(0, slots_S),
                slots_T=page_T * self._page_tokens + offsets_T,
            )
        return kinds

    def keep_tokens(self, slots_S: Tensor, tokens_S: Tensor) -> None:
        """Remember the sampled tokens as inputs of the next step; graph-safe."""
        # Padding rows may have sampled nonsense, which must never index the embedding.
        self.last_tokens_R.index_copy_(0, slots_S, tokens_S * (slots_S < self.padding_slot))

    def _write_updates(
        self, entries: list[PlanEntry], indices: np.ndarray, values: np.ndarray
    ) -> int:
        """Write (flat cell of pages_KRP, page) of all new pages; return how many."""
        count = 0
        for entry in entries:
            if not entry.new_pages:
                continue
            row = entry.slot * self._num_columns
            for kind, updates in entry.new_pages.items():
                base = self._kind_strides[self._kind_index[kind]] + row
                for column, page in updates:
                    indices[count] = base + column
                    values[count] = page
                    count += 1
        return count


class _MixedStep:
    """Fills the ring's next buffer with a step that has prompts; `sections` says where what is."""

    def __init__(self, tables: DeviceTables, plan: StepPlan) -> None:
        self.sections: dict[str, tuple[int, int]] = {}
        self.num_elements = 0
        self._array = tables._ring.next_array()
        entries = plan.decode + plan.prefill
        self._write_rows(entries)
        self._write_tokens(entries, plan.num_tokens)
        starts = np.cumsum([0] + [e.num_tokens for e in plan.prefill])
        self._section("starts", len(starts))[:] = starts
        self._write_sampled(entries)
        new = [e for e in plan.prefill if e.is_new]
        self.num_new = len(new)
        self._section("new_slots", len(new))[:] = [e.slot for e in new]
        packed = self._section("packed", _PACKED * len(new))
        if new:
            packed[:] = np.array([pack(e.sampling) for e in new], dtype=np.int64).T.reshape(-1)
        num_updates = sum(len(u) for e in entries for u in e.new_pages.values())
        indices = self._section("indices", num_updates)
        tables._write_updates(entries, indices, self._section("values", num_updates))

    def _section(self, name: str, num_elements: int) -> np.ndarray:
        start, end = self.num_elements, self.num_elements + num_elements
        assert end <= len(self._array), f"a step of {end} numbers passes the staging buffer"
        self.sections[name] = (start, end)
        self.num_elements = end
        return self._array[start:end]

    def _write_rows(self, entries: list[PlanEntry]) -> None:
        self._section("slots", len(entries))[:] = [e.slot for e in entries]
        self._section("lengths", len(entries))[:] = [
            e.start_position + e.num_tokens for e in entries
        ]

    def _write_tokens(self, entries: list[PlanEntry], num_tokens: int) -> None:
        tokens = self._section("tokens", num_tokens)
        positions = self._section("positions", num_tokens)
        sequences = self._section("sequences", num_tokens)
        end = 0
        for i, entry in enumerate(entries):
            start, end = end, end + entry.num_tokens
            # 0 for decode entries: their token is on the device.
            tokens[start:end] = 0 if entry.token_ids is None else entry.token_ids
            first = entry.start_position
            positions[start:end] = np.arange(first, first + entry.num_tokens)
            sequences[start:end] = i

    def _write_sampled(self, entries: list[PlanEntry]) -> None:
        ends = np.cumsum([e.num_tokens for e in entries])
        sampled = [(e, end) for e, end in zip(entries, ends, strict=True) if e.is_last_chunk]
        self._section("sample_rows", len(sampled))[:] = [end - 1 for _, end in sampled]
        self._section("sample_slots", len(sampled))[:] = [e.slot for e, _ in sampled]
        self._section("sample_positions", len(sampled))[:] = [
            e.start_position + e.num_tokens for e, _ in sampled
        ]
