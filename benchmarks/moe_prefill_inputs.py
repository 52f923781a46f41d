"""What the checks and timings of the experts for many tokens draw, compare and measure with (moe_prefill_fused.py)."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rose.kernels.cases import Case
from rose.kernels.check import cases_module

SIZES = {
    "20b": {"D": 2880, "I": 2880, "E": 32, "K": 4},
    "120b": {"D": 2880, "I": 2880, "E": 128, "K": 4},
}
WIDE = {"D": 2880, "I": 2880, "K": 4}


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One shape, drawn as the cases of moe_experts are."""

    name: str
    sizes: dict[str, int]
    tokens: int
    counts: tuple[int, ...] = ()
    """Rows of each expert instead of a drawn routing (K = 1)."""
    options: dict[str, Any] = field(default_factory=dict)


SMALL = {"D": 192, "I": 192, "E": 4, "K": 2}
ONE = {"D": 320, "I": 256, "K": 1}
LADDER = [
    Rung(name="full_tiles", sizes={**ONE, "E": 2}, tokens=512, counts=(256, 256)),
    Rung(name="aligned_short_tile", sizes={**ONE, "E": 2}, tokens=292, counts=(256, 36)),
    Rung(name="few_rows_of_a_tile", sizes={**ONE, "E": 2}, tokens=260, counts=(256, 4)),
    Rung(name="row_1_starts_an_expert", sizes={**ONE, "E": 2}, tokens=129, counts=(1, 128)),
    Rung(name="row_67_starts_an_expert", sizes={**ONE, "E": 3}, tokens=330, counts=(67, 0, 263)),
    *(Rung(name=f"rows_{t}", sizes=SMALL, tokens=t) for t in (1, 63, 64, 65, 129)),
    Rung(name="one_k_block", sizes={"D": 64, "I": 64, "E": 4, "K": 1}, tokens=70),
    Rung(name="empty_experts", sizes={**WIDE, "E": 32}, tokens=300, options={"experts_hit": 5}),
    Rung(name="foreign", sizes={**WIDE, "E": 8}, tokens=700, options={"foreign": True}),
    Rung(name="128_experts", sizes={"D": 320, "I": 256, "E": 128, "K": 4}, tokens=3000),
    Rung(name="20b_balanced_8192", sizes={**WIDE, "E": 32}, tokens=8192),
    Rung(name="20b_random_8192", sizes={**WIDE, "E": 32}, tokens=8192),
]  # fmt: skip


def draw(
    sizes: dict[str, int],
    tokens: int,
    weight: str,
    *,
    seed: int,
    device: str = "cuda",
    **options: Any,
) -> tuple[Case, dict[str, Any]]:
    """Return a case and its arguments; options that are not given are those of the plain cases."""
    module = cases_module("moe_experts")
    case = Case(
        name="drawn",
        sizes={**sizes, "T": tokens},
        formats={"activation": "bf16", "weight": weight},
        rows=tokens,
        options={**module.CASES[0].options, **options},
    )
    return case, module.inputs(case, seed, device)


def time_us(call: Callable[[], Any], replays: int = 9) -> tuple[float, float]:
    """Return (median, smallest) microseconds of a call inside a replayed graph."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    calls = int(min(max(3000.0 / max(start.elapsed_time(end) * 1e3, 1.0), 1), 50))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    samples = []
    for _ in range(replays):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(samples), min(samples)


def balanced_ids(tokens: int, experts: int, chosen: int) -> torch.Tensor:
    """Return ids that give every expert the same number of rows, in an order that is not sorted."""
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    pairs = order[:, None] * chosen + torch.arange(chosen)[None, :]
    return (pairs % experts).int().cuda()


def ids_of(counts: tuple[int, ...]) -> Tensor:
    """Return [T, 1] ids with so many rows for each expert, not in order."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    return ids[order].unsqueeze(1).cuda()


def problem(
    name: str, found: Tensor, wanted: Tensor, relative: float, largest: float
) -> str | None:
    """Compare on the GPU: relative norm, and the largest difference over the largest value."""
    if found.shape != wanted.shape:
        return f"{name}: shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    a, b = found.float(), wanted.float()
    difference = (a - b).abs()
    norm = (difference.norm() / b.norm().clamp_min(1e-30)).item()
    top = (difference.max() / b.abs().max().clamp_min(1e-30)).item()
    if norm <= relative and top <= largest:
        return None
    bad = torch.nonzero(~(difference <= largest * b.abs().max()))
    rows = bad[:, 0].unique().tolist() if len(bad) else []
    columns = bad[:, -1].unique().tolist() if len(bad) else []
    return (
        f"{name}: relative {norm:.2e}, largest {top:.2e}, {len(bad)} bad in {len(rows)} rows "
        f"{rows[:6]}..{rows[-2:]} and {len(columns)} columns {columns[:6]}..{columns[-2:]}"
    )


def spread(values_RC: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return values times their group's scale; scales come as [groups, R or more]."""
    rows, columns = values_RC.shape
    return values_RC.float() * scales[:, :rows].T.repeat_interleave(group, dim=1)[:, :columns]


def by_expert(a_RC: Tensor, starts: list[int], matrix: Any, bias_EN: Tensor) -> Tensor:
    """Return the product of each expert's rows with its matrix, float32."""
    out = a_RC.new_zeros(a_RC.shape[0], bias_EN.shape[1])
    for e, (begin, end) in enumerate(pairwise(starts)):
        if end > begin:
            out[begin:end] = a_RC[begin:end] @ matrix[e].to_float().T + bias_EN[e].float()
    return out
