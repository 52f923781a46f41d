"""Random operands have the size they claim in every format, and paged KV is as nasty as it claims."""

from __future__ import annotations

import math

import pytest
import torch

from rose.kernels.draw import expected_experts, generator, matrix, routing
from rose.kernels.paged import JUNK, draw_pages, first_column


@pytest.mark.parametrize("format_name", ["float64", "float32", "bf16", "mxfp4", "fp8_block"])
@pytest.mark.parametrize(("columns", "gain"), [(64, 1.0), (320, 1.0), (2880, 1.4), (96, 3.0)])
def test_elements_are_one_over_the_root_of_the_columns(format_name, columns, gain):
    # Enough rows for the few scales of fp8 (128 x 128) to average out.
    drawn = matrix(format_name, 8, 512, columns, source=generator("cpu", 0), gain=gain)
    assert drawn.shape == (8, 512, columns)
    rms = drawn.to_float().square().mean().sqrt().item()
    assert rms == pytest.approx(gain / math.sqrt(columns), rel=0.2)
    assert torch.isfinite(drawn.to_float()).all()
    if drawn.scales is not None:
        assert drawn.scales.unique().numel() >= 3  # a scale at the wrong place shows


def test_what_cannot_be_drawn_is_said():
    with pytest.raises(ValueError, match="blocks of 32, got 40"):
        matrix("mxfp4", 4, 40, source=generator("cpu", 0))
    with pytest.raises(ValueError, match="fp8_group128 is a format of activations"):
        matrix("fp8_group128", 4, 40, source=generator("cpu", 0))


def test_routing_chooses_different_experts_and_hits_as_many_as_expected():
    ids_TK = routing(40, 32, 4, source=generator("cpu", 0))
    assert all(len(set(row)) == 4 for row in ids_TK.tolist())
    counts = [
        routing(5, 32, 4, source=generator("cpu", seed)).unique().numel() for seed in range(200)
    ]
    assert sum(counts) / 200 == pytest.approx(expected_experts(5, 32, 4), rel=0.02)


def test_pages_are_disjoint_freed_before_the_window_and_full_of_junk_past_the_end():
    kv_pages, table_SP = draw_pages(
        [70, 17],
        [69, 0],
        page_tokens=16,
        kv_heads=1,
        head_dim=4,
        window_tokens=20,
        kv_format="float32",
        source=generator("cpu", 0),
    )
    assert first_column(69, 20, 16) == 3
    assert table_SP[0].tolist()[:3] == [-1, -1, -1]  # position 69 sees 50 .. 69: page 3 on
    assert table_SP[:, -2:].max() == -1
    used = table_SP[table_SP >= 0]
    assert len(used.unique()) == len(used) == 4
    assert 0 not in used
    last = kv_pages[int(table_SP[1, 1])]
    assert (last[:, :, 1:] == JUNK).all()
    assert (last[:, :, :1].abs() < 10).all()
