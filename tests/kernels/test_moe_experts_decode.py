"""The decode experts mean what the reference means, and their packed arithmetic is exact."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

import gluon_emulator as emulator

from rose.kernels import registry
from rose.kernels.cases import compare
from rose.kernels.moe_experts import cases
from rose.kernels.moe_experts import gluon_decode_device as device
from rose.kernels.moe_experts.reference import reference

registry.load("moe_experts")
impl = importlib.import_module("rose.kernels.moe_experts.gluon_decode_impl")


def unpack(words: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, ...]:
    """The bit operations of the assembly, on both halves at once."""
    words = np.asarray(words).view(np.uint32)
    scale = ((np.asarray(scales).view(np.uint32) & 0xFFFF).astype(np.uint32) << 16).view(np.float32)
    moves = [(-12, -6), (-8, -2), (-4, 2), (0, 6)]  # left shifts are negative
    pairs = []
    for sign, magnitude in moves:
        s = words << -sign if sign <= 0 else words >> sign
        m = words << -magnitude if magnitude < 0 else words >> magnitude
        pairs.append((s & 0x80008000) | (m & 0x01C001C0))
    low = [emulator.wrap(((p & 0xFFFF) << 16).view(np.float32) * scale) for p in pairs]
    high = [emulator.wrap((p & 0xFFFF0000).view(np.float32) * scale) for p in pairs]
    return (*low, *high)


class _Plain:
    """Stands for a Triton kernel in `kernel[grid](...)` by a function with its meaning."""

    def __init__(self, function) -> None:
        self.function = function

    def __getitem__(self, _grid):
        return self.function


def _sort(ids, order, starts, num_pairs, *, EXPERTS, PAIRS, PDL, **_):
    flat = ids.reshape(-1)
    found = [torch.nonzero(flat == e).flatten() for e in range(EXPERTS)]
    listed = torch.cat(found).int()
    order[: len(listed)] = listed
    starts.copy_(torch.tensor([0, *np.cumsum([len(f) for f in found])]))


def _combine(y, ids, weights, out, *, K, OUT, BLOCK, PDL, **_):
    here = (ids >= 0).unsqueeze(-1)
    y_TKD = torch.where(here, y.view(*ids.shape, OUT), 0.0)
    out.copy_((y_TKD * weights.float().unsqueeze(-1)).sum(1))


@pytest.fixture
def on_cpu(monkeypatch):
    for name in ("gate_up_kernel", "down_kernel", "down_combine_kernel"):
        monkeypatch.setattr(
            device, name, emulator.Launcher(getattr(device, name), {"unpack": unpack})
        )
    monkeypatch.setattr(impl, "sort_pairs_kernel", _Plain(_sort))
    monkeypatch.setattr(impl, "combine_kernel", _Plain(_combine))


def _check(case, shape) -> None:
    arguments = cases.inputs(case, 3, "cpu")
    wanted = {**arguments, "out_TD": arguments["out_TD"].float()}
    reference(**wanted)
    arguments["out_TD"].fill_(float("nan"))
    impl.launch(shape, **arguments)
    difference = compare("out_TD", arguments["out_TD"], wanted["out_TD"], cases.tolerance(case))
    assert difference is None, difference


SIZES = {"D": 192, "I": 96, "E": 8, "K": 4}


def _case(tokens, *, sizes=SIZES, **options):
    return cases.make_case("drawn", tokens, sizes, **options)


@pytest.mark.parametrize(
    "shape",
    [
        impl.Launch(
            mode=impl.BY_PAIR, up=impl.Tile(splits=2), down=impl.Tile(splits=2), is_fused=True
        ),
        impl.Launch(mode=impl.BY_PAIR, up=impl.Tile(splits=1), down=impl.Tile(splits=4)),
        impl.Launch(mode=impl.BY_LEADER, up=impl.Tile(splits=2), down=impl.Tile(splits=2)),
        impl.Launch(mode=impl.BY_EXPERT, up=impl.Tile(splits=2), down=impl.Tile(splits=2)),
        impl.Launch(
            mode=impl.SORTED, up=impl.Tile(splits=1, warps_m=2), down=impl.Tile(splits=1, warps_m=2)
        ),
        impl.Launch(
            mode=impl.SORTED, tokens=16, up=impl.Tile(splits=1, stages=3), down=impl.Tile(splits=2)
        ),
    ],
    ids=["pairs_fused", "pairs", "leader", "expert", "sorted_8", "sorted_16"],
)
@pytest.mark.parametrize("foreign", [False, True], ids=["all_here", "some_elsewhere"])
@pytest.mark.usefixtures("on_cpu")
def test_each_way_to_share_out_the_work_gives_the_reference(shape, foreign):
    _check(_case(5, foreign=foreign), shape)


@pytest.mark.parametrize("mode", [impl.BY_LEADER, impl.BY_EXPERT, impl.SORTED])
@pytest.mark.usefixtures("on_cpu")
def test_an_expert_with_more_tokens_than_one_pass_takes_is_served_in_passes(mode):
    shape = impl.Launch(mode=mode, up=impl.Tile(splits=2), down=impl.Tile(splits=2))
    _check(_case(13, experts_hit=4), shape)


@pytest.mark.parametrize("tokens", [1, 2, 7, 17])
@pytest.mark.usefixtures("on_cpu")
def test_the_chosen_launch_shapes_give_the_reference(tokens):
    case = _case(tokens)
    _check(case, impl.choose(tokens, SIZES))


def test_every_code_and_scale_is_unpacked_exactly():
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = np.arange(16, dtype=np.uint32)
    word = (codes[:8] << (4 * np.arange(8, dtype=np.uint32))).sum(dtype=np.uint32)
    negative = word | np.uint32(0x88888888)
    for exponent in (58, 100, 127, 192):
        scale = np.int32((exponent * 128 + 62 * 128) * 0x10001 & 0x7FFFFFFF)
        for bits, sign in ((word, 1), (negative, -1)):
            found = np.array([float(v[0]) for v in unpack(np.array([bits]), np.array([scale]))])
            wanted = sign * magnitudes * 2.0 ** (exponent - 127 - 64)
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 17, 64, 128, 512])
@pytest.mark.parametrize("sizes", [cases.GPT_OSS_20B, cases.GPT_OSS_120B, cases.SMALL])
def test_launch_shapes_divide_the_matrices(tokens, sizes):
    shape = impl.choose(tokens, sizes)
    assert sizes["I"] % (16 * shape.up.warps_m) == 0
    assert sizes["D"] % (shape.down.warps_m * shape.down.rows_per_warp) == 0
