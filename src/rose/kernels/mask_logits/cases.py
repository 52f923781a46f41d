"""Cases of mask_logits: gpt-oss's vocabulary first, then word ends, full, empty and single-bit masks."""

from __future__ import annotations

from typing import Any

import torch

from rose.kernels.cases import EXACT, Case, Tolerance
from rose.kernels.draw import generator
from rose.utils.math import ceil_div


def _case(name: str, rows: int, vocab: int, *, kept: str = "half", **flags: Any) -> Case:
    """`kept`: how many tokens a mask allows: half, one, none or all."""
    return Case(
        name=name,
        sizes={"S": rows, "V": vocab},
        formats={"logits": "float32"},
        phase="decode" if rows <= 256 else "prefill",
        rows=rows,
        options={"kept": kept},
        **flags,
    )


CASES = [
    *(_case(f"gpt_oss_{rows}", rows, 201088, large=True, timed=True) for rows in (1, 16, 128, 256)),
    _case("gpt_oss_one", 16, 201088, kept="one", large=True, timed=True),
    _case("gpt_oss_all", 16, 201088, kept="all", large=True, timed=True),
    *(_case(f"vocab_{v}", 3, v) for v in (1, 31, 32, 33, 97, 4095, 4097)),
    *(_case(f"kept_{kept}", 5, 940, kept=kept) for kept in ("one", "none", "all")),
    _case("many_rows", 300, 64),
]


def inputs(case: Case, seed: int, device: str) -> dict[str, Any]:
    """Draw one call; two thirds of the rows share a slot with another, as padding rows do."""
    source = generator(device, seed)
    rows, vocab = case.sizes["S"], case.sizes["V"]
    num_slots, num_words = rows // 3 + 1, ceil_div(vocab, 32)
    slots_S = torch.randint(num_slots, (rows,), generator=source, device=device)
    shape = (num_slots, num_words)
    masks_RW = torch.randint(-(2**31), 2**31, shape, generator=source, device=device)
    if case.options["kept"] == "one":
        masks_RW.zero_()
        masks_RW[:, (vocab - 1) // 32] = 1 << ((vocab - 1) % 32)
    elif case.options["kept"] != "half":
        masks_RW.fill_(-1 if case.options["kept"] == "all" else 0)
    logits_SV = torch.randn(rows, vocab, generator=source, device=device)
    return {
        "slots_S": slots_S,
        # 1 << 31 is -2^31 as int32
        "masks_RW": (masks_RW & 0xFFFFFFFF).to(torch.int32),
        "logits_SV": logits_SV,
    }


def tolerance(case: Case) -> Tolerance:
    """Logits are kept or replaced."""
    return EXACT


def flops(case: Case) -> int:
    """None to speak of."""
    return case.sizes["S"] * case.sizes["V"]


def num_bytes(case: Case) -> int:
    """The masks read once, the banned logits written once."""
    written = {"half": 0.5, "one": 1.0, "none": 1.0, "all": 0.0}[case.options["kept"]]
    rows, vocab = case.sizes["S"], case.sizes["V"]
    return rows * (8 + vocab // 8 + int(4 * written * vocab))


def promised(case: Case, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the logits with a number in place of -inf, whose differences are no numbers."""
    return tensor.masked_fill(tensor == float("-inf"), -1e6)
