"""Masks of slots: bits reach the logits of the rows that have the slot, and nobody else's."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rose.kernels.mask_logits.cases import CASES
from rose.sampling.masks import MaskTable
from rose.utils.device import detect

CPU = detect("cpu")


def _bits(*token_ids, num_bytes):
    mask = bytearray(num_bytes)
    for token in token_ids:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


def _allowed(table, slots, vocab, num_columns=None):
    logits_SV = torch.zeros(len(slots), num_columns or vocab)
    table.apply(logits_SV, torch.tensor(slots), phase="decode")
    return [(row != float("-inf")).nonzero().flatten().tolist() for row in logits_SV]


def test_a_mask_holds_for_its_slot_until_another_comes():
    table = MaskTable(4, 70, CPU)
    everything = list(range(70))
    assert _allowed(table, [0, 3], 70) == [everything, everything]
    table.write({1: _bits(0, 31, 32, 69, num_bytes=12), 2: _bits(5, num_bytes=12)})
    assert _allowed(table, [2, 0, 1, 1], 70) == [[5], everything, [0, 31, 32, 69], [0, 31, 32, 69]]
    table.write({1: None})
    assert _allowed(table, [1, 2], 70) == [everything, [5]]


def test_ids_past_a_short_mask_are_not_allowed_and_past_the_vocabulary_stay():
    table = MaskTable(2, 70, CPU)
    table.write({0: _bits(1, 33, num_bytes=8)})
    assert _allowed(table, [0], 70, num_columns=72) == [[1, 33, 70, 71]]


def test_a_longer_mask_than_the_vocabulary_is_cut():
    table = MaskTable(2, 40, CPU)
    table.write({0: _bits(39, 200, num_bytes=32)})
    assert _allowed(table, [0], 40) == [[39]]


def test_triton_masks_what_the_reference_masks():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "rose.kernels", "check", "mask_logits", "--interpret"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{len([c for c in CASES if not c.large])} ok, 0 failed" in found.stdout, found.stdout


def test_warming_up_changes_no_mask():
    table = MaskTable(2, 40, CPU)
    table.write({0: _bits(3, num_bytes=8)})
    table.warm_up()
    assert _allowed(table, [0, 1], 40) == [[3], list(range(40))]
