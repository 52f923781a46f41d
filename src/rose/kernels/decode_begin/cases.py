"""Cases of decode_begin: gpt-oss batches first, then page ends, new pages, padding and narrow tables."""

from __future__ import annotations

from typing import Any

import torch

from rose.kernels.cases import EXACT, Case, Tolerance
from rose.kernels.draw import generator
from rose.utils.math import ceil_div


def _case(
    name: str,
    rows: int,
    *,
    slots: int = 16,
    kinds: int = 2,
    context: int = 640,
    page: int = 16,
    longest: int | None = None,
    padding: int = 0,
    **flags: Any,
) -> Case:
    """`longest`: bound on lengths that the step was told; `padding`: rows that are not real."""
    return Case(
        name=name,
        sizes={"S": rows, "R": slots + 1, "K": kinds, "L": page, "C": context},
        phase="decode",
        rows=rows,
        options={"longest": longest or context, "padding": padding},
        **flags,
    )


_GPT_OSS = {"slots": 256, "context": 131072, "page": 64, "large": True, "timed": True}

CASES = [
    *(_case(f"gpt_oss_{rows}", rows, **_GPT_OSS) for rows in (1, 8, 32, 128, 256)),
    _case("one_row", 1),
    _case("all_slots", 16),
    _case("padded", 8, padding=5),
    _case("only_padding", 4, padding=4),
    _case("one_kind", 9, kinds=1, padding=1),
    _case("narrow", 9, longest=100),
    _case("wide", 3, context=40000),
    _case("pages_of_64", 12, page=64, context=1000),
]


def inputs(case: Case, seed: int, device: str) -> dict[str, Any]:
    """Draw one step: positions all over, at page starts in every third row, which then has new pages."""
    source = generator(device, seed)
    s, rows = case.sizes, case.sizes["S"]
    num_columns = ceil_div(s["C"], s["L"])
    longest, padding = case.options["longest"], case.options["padding"]
    width = min(ceil_div(longest, s["L"]), num_columns)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=source, device=device)

    lengths_R = integers(longest, s["R"])
    lengths_R[::3] -= lengths_R[::3] % s["L"]
    lengths_R[-1] = 0
    last_tokens_R = integers(200000, s["R"])
    last_tokens_R[::4] = -1  # of a damaged row
    slots_S = torch.randperm(s["R"] - 1, generator=source, device=device)[:rows]
    slots_S[rows - padding :] = s["R"] - 1
    position_S = lengths_R[slots_S]
    is_new_S = (position_S % s["L"] == 0) & (slots_S < s["R"] - 1)
    columns_S = torch.where(is_new_S, position_S // s["L"], -1)

    def output(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return {
        "slots_S": slots_S,
        "columns_KS": columns_S.repeat(s["K"], 1),
        "ids_KS": integers(9999, s["K"], rows),
        "pages_KRP": integers(9999, s["K"], s["R"], num_columns).to(torch.int32),
        "lengths_R": lengths_R.to(torch.int32),
        "last_tokens_R": last_tokens_R,
        "ints_IR": integers(1 << 62, 2, s["R"]) % torch.tensor([[1 << 62], [1000]], device=device),
        "floats_FR": torch.rand(3, s["R"], generator=source, device=device),
        "page_tokens": s["L"],
        "token_ids_S": output(rows),
        "positions_S": output(rows),
        "next_positions_S": output(rows),
        "lengths_S": output(rows, dtype=torch.int32),
        "tables_KSW": output(s["K"], rows, width, dtype=torch.int32),
        "kv_slots_KS": output(s["K"], rows),
        "seed_S": output(rows),
        "top_k_S": output(rows, dtype=torch.int32),
        "floats_FS": output(3, rows, dtype=torch.float32),
    }


def tolerance(case: Case) -> Tolerance:
    """Everything is moved, nothing is computed with."""
    return EXACT


def flops(case: Case) -> int:
    """None to speak of."""
    return case.sizes["S"]


def num_bytes(case: Case) -> int:
    """The tables, read and written."""
    s = case.sizes
    return 2 * 4 * s["K"] * s["S"] * ceil_div(case.options["longest"], s["L"])
