"""Dependent launches are for few rows on a GPU that has them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rose.kernels import dependent


def _rows(num_rows: int, device: str) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(num_rows, 8, device=device)


@pytest.mark.parametrize(
    ("num_rows", "device", "has_instructions", "pays"),
    [
        (1, "cuda", True, True),
        (64, "cuda", True, True),
        (65, "cuda", True, False),
        (1, "cuda", False, False),
        (1, "cpu", True, False),
    ],
)
def test_it_pays_up_to_64_rows_on_hopper(num_rows, device, has_instructions, pays, monkeypatch):
    monkeypatch.setattr(dependent, "_has_instructions", lambda: has_instructions)
    assert dependent.pays(_rows(num_rows, device)) is pays
    assert dependent.options(pays) == ({"launch_pdl": True} if pays else {})
