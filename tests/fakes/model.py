"""A model whose next token depends on every page it should read, and on nothing else.

It writes (token + 1, position) into its pages and reads its history back through the page tables, so a page
that is wrong, freed too early or shared changes the tokens. Layer 0 has a window, layer 1 sees everything.
"""

from __future__ import annotations

import itertools

import torch

from rose.config.model import ModelConfig
from rose.kernels.registry import REGIMES, KernelRow

WINDOW = 24
VOCAB = 97


def fake_config(**changes):
    values = {
        "architecture": "fake",
        "vocab_size": VOCAB,
        "hidden_size": 2,
        "num_layers": 2,
        "num_q_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 2,
        "context_tokens": 512,
        "window_tokens": (WINDOW, None),
    }
    return ModelConfig(**(values | changes))


def expected_next(token_ids, window=WINDOW):
    """The token that follows, by the model's rule."""
    total = sum((i + 1) * (t + 1) for i, t in enumerate(token_ids))
    near = sum(t + 1 for t in token_ids[-window:])
    return (3 * total + 5 * near) % VOCAB


def expected_output(prompt, num_tokens):
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(expected_next(tokens))
    return tokens[len(prompt) :]


def kind_of(window):
    return "full" if window is None else "window"


class FakeModel:
    """See the module."""

    weight_bytes = 0

    def __init__(self, config=None, num_head_columns=None):
        self.config = config or fake_config()
        self.num_head_columns = num_head_columns or self.config.vocab_size
        self.rule_window = WINDOW
        self.num_calls = 0
        self.num_tokens_seen = []

    def forward(self, token_ids_T, context):
        self.num_calls += 1
        self.num_tokens_seen.append(len(token_ids_T))
        assert token_ids_T.shape == context.positions_T.shape == (context.num_tokens,)
        for layer, window in enumerate(self.config.window_tokens):
            pages = context.kv_pages[layer]
            slots_T = context.kinds[kind_of(window)].slots_T
            is_kept = slots_T >= 0
            page, offset = slots_T // pages.shape[3], slots_T % pages.shape[3]
            value_T2 = torch.stack([token_ids_T + 1, context.positions_T], 1).to(pages.dtype)
            pages[page[is_kept], 0, 0, offset[is_kept]] = value_T2[is_kept]
        rows = [(s, s, 1) for s in range(context.num_decode)]
        starts = (context.query_starts_N1 + context.num_decode).tolist()
        for n, (start, end) in enumerate(itertools.pairwise(starts)):
            rows.append((context.num_decode + n, start, end - start))
        hidden_TD = torch.zeros(context.num_tokens, 2, dtype=torch.float64)
        for sequence, first_row, count in rows:
            length = int(context.lengths_S[sequence])
            assert length <= context.max_length
            if length == 0:
                continue
            first = length - count
            positions = context.positions_T[first_row : first_row + count]
            assert torch.equal(positions, torch.arange(first, length))
            states = self._states(sequence, first, length, context)
            hidden_TD[first_row : first_row + count, 0] = states.double()
        if context.sampled is None:
            return hidden_TD
        ends = torch.tensor([first_row + count for _, first_row, count in rows])
        rows_M = context.sampled.rows_M
        assert torch.equal(ends[context.sampled.sequences_M] - 1, rows_M)
        return hidden_TD.index_select(0, rows_M)

    def _states(self, sequence, first, length, context):
        """The number behind the next token, for positions first .. length - 1."""
        near_window, _ = self.config.window_tokens
        near_start = 0 if near_window is None else max(0, first - near_window + 1)
        near = self._read(0, sequence, near_start, length, context)
        sums = torch.cat([torch.zeros(1, dtype=torch.int64), near.cumsum(0)])
        ends = torch.arange(first, length) + 1
        begins = (ends - self.rule_window).clamp(min=0)
        near_sums = sums[ends - near_start] - sums[begins - near_start]
        everything = self._read(1, sequence, 0, length, context)
        totals = (everything * torch.arange(1, length + 1)).cumsum(0)[first:]
        return 3 * totals + 5 * near_sums

    def _read(self, layer, sequence, start, end, context):
        """The tokens of positions start .. end - 1, out of the pages."""
        pages = context.kv_pages[layer]
        kind, size = kind_of(self.config.window_tokens[layer]), pages.shape[3]
        positions = torch.arange(start, end)
        page = context.kinds[kind].page_table_SP[sequence].to(torch.int64)[positions // size]
        assert (page >= 0).all(), f"{kind}: a page of {start}..{end} is not in the table"
        values = pages[page, 0, 0, positions % size].to(torch.int64)
        assert torch.equal(values[:, 1], positions), f"{kind}: {start}..{end} holds {values[:, 1]}"
        return values[:, 0]

    def logits(self, hidden_SD):
        target_S = hidden_SD[:, 0].to(torch.int64) % self.config.vocab_size
        logits_SV = torch.zeros(len(hidden_SD), self.num_head_columns)
        logits_SV[:, self.config.vocab_size :] = 100.0
        logits_SV[torch.arange(len(hidden_SD)), target_S] = 4.0
        return logits_SV

    def kernel_table(self):
        return [KernelRow("everything", REGIMES[0], "fake")]
