"""StepPlan -> device tensors. What lives longer than a step is kept on the device, in tables by slot.

A decode step sends nothing but its slots and the few pages that are new: positions, lengths, last tokens,
page tables and sampling parameters are read by slot on the device, so the same code is captured in graphs.
A step with prompts in it sends all it needs in one copy. Knows neither models nor sampling rules.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rose.cache.layout import CacheLayout
from rose.config.engine import KernelsConfig
from rose.kernels.registry import MANY_DECODE, REGIMES, KernelRow, bind
from rose.layers.context import ForwardContext, KindContext, SampledRows
from rose.runtime.plan import MAX_HIT_COLUMNS, PlanEntry, StepPlan
from rose.runtime.staging import StagingRing
from rose.sampling.adjustments import AdjustmentTable, adjustment_bytes
from rose.sampling.batch import FLOATS, INTS, SamplingBatch, SamplingTable, pack
from rose.sampling.masks import MaskTable, mask_bytes
from rose.utils.device import DeviceFacts
from rose.utils.math import ceil_div

_PACKED = INTS + FLOATS


def table_bytes(
    layout: CacheLayout, *, num_slots: int, context_tokens: int, vocab_size: int
) -> int:
    """Return the device bytes of `DeviceTables` but for what is a few KiB."""
    num_rows, num_columns = num_slots + 1, ceil_div(context_tokens, layout.page_tokens)
    pages = 4 * len(layout.kinds) * num_rows * num_columns
    return pages + adjustment_bytes(num_rows, vocab_size) + mask_bytes(num_rows, vocab_size)


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """One step as tensors; `sampling` has the parameters of the rows that sample.

    Shapes   T new tokens, S rows that sample
             token_ids_T int64;  slots_S int64 (the last slot: padding);  positions_S int64: index that the
             sampled token will have. Which rows of T sample is in the context
    """

    token_ids_T: Tensor
    context: ForwardContext
    slots_S: Tensor
    positions_S: Tensor
    sampling: SamplingBatch


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
        vocab_size: int,
        device: DeviceFacts,
        kernels: KernelsConfig | None = None,
    ) -> None:
        kernels = kernels or KernelsConfig()
        self.layout = layout
        self.device = torch.device(device.kind)
        self.padding_slot = num_slots
        self.max_step_tokens, self.context_tokens = max_step_tokens, context_tokens
        self._page_tokens = layout.page_tokens
        self._kind_index = {k.kind: i for i, k in enumerate(layout.kinds)}
        num_rows, num_kinds = num_slots + 1, len(layout.kinds)
        self._begin = bind(
            "decode_begin",
            formats={},
            sizes={"K": num_kinds},
            device=device,
            regimes=(*(r for r in REGIMES if r.phase == "decode"), MANY_DECODE),
            only=kernels.only,
            check_calls=kernels.check_calls,
            batch_invariant=bool(kernels.batch_invariant),
        )
        self._num_columns = ceil_div(context_tokens, layout.page_tokens)
        self.pages_KRP = torch.full(
            (num_kinds, num_rows, self._num_columns), -1, dtype=torch.int32, device=self.device
        )
        self.lengths_R = torch.zeros(num_rows, dtype=torch.int32, device=self.device)
        self.last_tokens_R = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.sampling = SamplingTable(num_rows, self.device)
        self.adjustments = AdjustmentTable(num_rows, vocab_size, self.device)
        self.masks = MaskTable(num_rows, vocab_size, device, kernels=kernels)
        self._kind_strides = [k * num_rows * self._num_columns for k in range(num_kinds)]
        hits = max(MAX_HIT_COLUMNS, self._num_columns)
        updates = num_kinds * (max_step_tokens // layout.page_tokens + 2 * num_rows + hits)
        capacity = 4 * max_step_tokens + (7 + _PACKED) * num_rows + 2 * updates + 2
        self._ring = StagingRing(capacity, self.device)
        self._received = torch.zeros(
            (1 + 2 * num_kinds) * num_rows, dtype=torch.int64, device=self.device
        )
        self._no_starts = torch.zeros(1, dtype=torch.int32, device=self.device)

    def kernel_table(self) -> list[KernelRow]:
        """Return lines for the start-up table."""
        return [*self._begin.rows(), *self.masks.kernel_table()]

    def send_decode(self, plan: StepPlan, num_rows: int) -> None:
        """Enqueue what the device does not know of a decode step: slots and new pages.

        Units    num_rows: rows of the batch, padding included
        """
        array = self._ring.next_array()
        num_kinds, num_real = len(self._kind_index), len(plan.decode)
        array[:num_real] = plan.sample_slots
        array[num_real:num_rows] = self.padding_slot
        columns_KS, ids_KS = array[num_rows : (1 + 2 * num_kinds) * num_rows].reshape(
            2, num_kinds, num_rows
        )
        columns_KS.fill(-1)
        for row, entry in enumerate(plan.decode):
            if entry.new_pages:
                for kind, updates in entry.new_pages.items():
                    # One token needs one page at most.
                    [(column, page)] = updates
                    k = self._kind_index[kind]
                    columns_KS[k, row], ids_KS[k, row] = column, page
        self._ring.send((1 + 2 * num_kinds) * num_rows, self._received)

    def decode_inputs(self, num_rows: int, max_length: int, kv_pages: list[Tensor]) -> StepInputs:
        """Return the inputs of the decode step sent last, from device tables alone; graph-safe.

        Aliasing  advances lengths_R; writes the new pages into pages_KRP
        """
        num_kinds = len(self._kind_index)
        width = min(ceil_div(max_length, self._page_tokens), self._num_columns)
        received = self._received[: (1 + 2 * num_kinds) * num_rows].view(-1, num_rows)
        device, int32 = self.device, torch.int32
        ints = torch.empty(4 + num_kinds, num_rows, dtype=torch.int64, device=device)
        lengths_S, top_k_S = torch.empty(2, num_rows, dtype=int32, device=device)
        tables_KSW = torch.empty(num_kinds, num_rows, width, dtype=int32, device=device)
        floats_FS = torch.empty(FLOATS, num_rows, dtype=torch.float32, device=device)
        token_ids_S, positions_S, next_positions_S, seed_S = ints[:4]
        self._begin.select("decode", num_rows)(
            received[0],
            received[1 : 1 + num_kinds],
            received[1 + num_kinds :],
            pages_KRP=self.pages_KRP,
            lengths_R=self.lengths_R,
            last_tokens_R=self.last_tokens_R,
            ints_IR=self.sampling.ints_IR,
            floats_FR=self.sampling.floats_FR,
            page_tokens=self._page_tokens,
            token_ids_S=token_ids_S,
            positions_S=positions_S,
            next_positions_S=next_positions_S,
            lengths_S=lengths_S,
            tables_KSW=tables_KSW,
            kv_slots_KS=ints[4:],
            seed_S=seed_S,
            top_k_S=top_k_S,
            floats_FS=floats_FS,
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
            kinds={
                kind: KindContext(page_table_SP=tables_KSW[k], slots_T=ints[4 + k])
                for kind, k in self._kind_index.items()
            },
            kv_pages=kv_pages,
        )
        return StepInputs(
            token_ids_T=token_ids_S,
            context=context,
            slots_S=received[0],
            positions_S=next_positions_S,
            sampling=SamplingBatch.of(seed_S, top_k_S, floats_FS),
        )

    def mixed_inputs(
        self, plan: StepPlan, kv_pages: list[Tensor], *, max_length: int | None = None
    ) -> StepInputs:
        """Send a step with prompts in it and return its inputs.

        Units    max_length: what decode launches rely on; None: the plan's own
        Aliasing  sets lengths_R and the rows of new slots; applies the page updates
        """
        sent = _MixedStep(self, plan)
        device_array = torch.empty(sent.num_elements, dtype=torch.int64, device=self.device)
        self._ring.send(sent.num_elements, device_array)
        parts = sent.split(device_array)
        lengths_S = parts["lengths"]
        self.pages_KRP.view(-1).index_copy_(0, parts["changed"], parts["pages"])
        self.lengths_R.index_copy_(0, parts["slots"], lengths_S)
        if sent.num_new:
            self.sampling.write(parts["new_slots"], parts["packed"].view(_PACKED, sent.num_new))
        token_ids_T = parts["tokens"]
        num_decode = len(plan.decode)
        if num_decode:
            last_N = self.last_tokens_R.index_select(0, parts["slots"][:num_decode])
            # -1 of a row without a token, as in decode_begin: its request ends once the host knows.
            torch.clamp(last_N, min=0, out=token_ids_T[:num_decode])
        context = ForwardContext(
            phase="prefill",
            num_tokens=plan.num_tokens,
            num_decode=num_decode,
            max_query_tokens=max(e.num_tokens for e in plan.prefill),
            max_length=plan.max_length if max_length is None else max_length,
            positions_T=parts["positions"],
            lengths_S=lengths_S,
            query_starts_N1=parts["starts"],
            kinds=self._mixed_kinds(parts, plan.max_length),
            kv_pages=kv_pages,
            sampled=SampledRows(rows_M=parts["sample_rows"], sequences_M=parts["sample_sequences"]),
        )
        return StepInputs(
            token_ids_T=token_ids_T,
            context=context,
            slots_S=parts["sample_slots"],
            positions_S=parts["sample_positions"],
            sampling=self.sampling.gather(parts["sample_slots"]),
        )

    def _mixed_kinds(self, parts: dict[str, Tensor], max_length: int) -> dict[str, KindContext]:
        """Return where the KV of each kind is, in three operators: the first kernel of the model waits for them."""
        width = ceil_div(max_length, self._page_tokens)
        tables_KSW = self.pages_KRP[:, :, :width].index_select(1, parts["slots"])
        page_KT = self.pages_KRP.flatten(1).index_select(1, parts["cells"])
        slots_KT = torch.add(parts["offsets"], page_KT, alpha=self._page_tokens)
        return {
            kind: KindContext(page_table_SP=tables_KSW[k], slots_T=slots_KT[k])
            for kind, k in self._kind_index.items()
        }

    def keep_tokens(self, slots_S: Tensor, tokens_S: Tensor) -> None:
        """Remember the sampled tokens as inputs of the next step; graph-safe.

        Padding rows leave nonsense behind, and rows without finite logits -1; both are replaced where they are read.
        """
        self.last_tokens_R.index_copy_(0, slots_S, tokens_S)

    def _page_updates(self, entries: list[PlanEntry]) -> tuple[list[int], list[int]]:
        """Return flat cells of pages_KRP, and the pages to write there, of all new pages."""
        cells: list[int] = []
        pages: list[int] = []
        for entry in entries:
            if not entry.new_pages:
                continue
            row = entry.slot * self._num_columns
            for kind, updates in entry.new_pages.items():
                base = self._kind_strides[self._kind_index[kind]] + row
                cells += [base + column for column, _ in updates]
                pages += [page for _, page in updates]
        return cells, pages


class _MixedStep:
    """Fills the ring's next buffer with a step that has prompts; `split` finds its sections on the device."""

    def __init__(self, tables: DeviceTables, plan: StepPlan) -> None:
        self.num_elements = 0
        self._sections: dict[str, tuple[int, int | None]] = {}
        """Name -> elements of int64, and how many numbers of int32 are in them; None: they are int64."""
        self._array = tables._ring.next_array()
        entries = plan.decode + plan.prefill
        self._write_rows(entries)
        self._write_tokens(
            entries, plan.num_tokens, tables._page_tokens, row_cells=tables._num_columns
        )
        starts = np.cumsum([0] + [e.num_tokens for e in plan.prefill])
        self._int32_section("starts", len(starts))[:] = starts
        self._write_sampled(entries)
        new = [(e.slot, pack(e.sampling)) for e in plan.prefill if e.sampling is not None]
        self.num_new = len(new)
        self._section("new_slots", len(new))[:] = [slot for slot, _ in new]
        packed = self._section("packed", _PACKED * len(new))
        if new:
            packed[:] = np.array([p for _, p in new], dtype=np.int64).T.reshape(-1)
        changed, pages = tables._page_updates(entries)
        self._section("changed", len(changed))[:] = changed
        self._int32_section("pages", len(pages))[:] = pages

    def split(self, device_array: Tensor) -> dict[str, Tensor]:
        """Return the sections of what was sent, as views."""
        sizes = [elements for elements, _ in self._sections.values()]
        views = device_array.split(sizes)
        return {
            name: view.view(torch.int32)[:count] if count is not None else view
            for (name, (_, count)), view in zip(self._sections.items(), views, strict=True)
        }

    def _section(self, name: str, num_elements: int, num_int32: int | None = None) -> np.ndarray:
        start, end = self.num_elements, self.num_elements + num_elements
        assert end <= len(self._array), f"a step of {end} numbers passes the staging buffer"
        self._sections[name] = (num_elements, num_int32)
        self.num_elements = end
        return self._array[start:end]

    def _int32_section(self, name: str, count: int) -> np.ndarray:
        """Two numbers in an element: kernels take them as they lie, without a conversion on the device."""
        return self._section(name, ceil_div(count, 2), count).view(np.int32)[:count]

    def _write_rows(self, entries: list[PlanEntry]) -> None:
        self._section("slots", len(entries))[:] = [e.slot for e in entries]
        self._int32_section("lengths", len(entries))[:] = [
            e.start_position + e.num_tokens for e in entries
        ]

    def _write_tokens(
        self, entries: list[PlanEntry], num_tokens: int, page_tokens: int, *, row_cells: int
    ) -> None:
        """Write tokens, their positions, and where these lie: cell of a kind's page table, offset in the page."""
        tokens = self._section("tokens", num_tokens)
        positions = self._section("positions", num_tokens)
        cells = self._section("cells", num_tokens)
        end = 0
        for entry in entries:
            start, end = end, end + entry.num_tokens
            if entry.token_ids is None:
                tokens[start:end] = 0  # it is on the device
            else:
                # numpy reads a list three times as slowly
                tokens[start:end] = array("I", entry.token_ids)
            first = entry.start_position
            positions[start:end] = np.arange(first, first + entry.num_tokens)
            cells[start:end] = entry.slot * row_cells
        cells += positions // page_tokens
        np.remainder(positions, page_tokens, out=self._section("offsets", num_tokens))

    def _write_sampled(self, entries: list[PlanEntry]) -> None:
        ends = np.cumsum([e.num_tokens for e in entries])
        sampled = [(i, e) for i, e in enumerate(entries) if e.is_last_chunk]
        self._section("sample_rows", len(sampled))[:] = [ends[i] - 1 for i, _ in sampled]
        self._section("sample_sequences", len(sampled))[:] = [i for i, _ in sampled]
        self._section("sample_slots", len(sampled))[:] = [e.slot for _, e in sampled]
        self._section("sample_positions", len(sampled))[:] = [
            e.start_position + e.num_tokens for _, e in sampled
        ]
