"""Cases of embedding: the gpt-oss table first, then small ones."""

from __future__ import annotations

from typing import Any

import torch

from rose.kernels.cases import EXACT, Case, Tolerance
from rose.kernels.draw import generator, normal
from rose.utils.dtypes import BITS_PER_ELEMENT, torch_dtype


def _case(
    name: str, tokens: int, vocab: int, hidden: int, *, dtype: str = "bf16", **flags: Any
) -> Case:
    return Case(
        name=name,
        sizes={"D": hidden, "V": vocab, "T": tokens},
        formats={"activation": dtype},
        phase="decode" if tokens <= 256 else "prefill",
        rows=tokens,
        **flags,
    )


CASES = [
    *(
        _case(f"gpt_oss_{t}", t, 201088, 2880, large=True, timed=True)
        for t in (1, 128, 8192, 32768)
    ),
    *(_case(f"rows_{t}", t, 300, 64, dtype="float32") for t in (1, 63, 64, 65, 129)),
    _case("all_gpt_oss_ids", 65, 201088, 16),
    _case("wide", 5, 100, 2880),
    _case("odd_width", 5, 100, 50, dtype="float32"),
    _case("float64", 5, 100, 64, dtype="float64"),
]


def inputs(case: Case, seed: int, device: str) -> dict[str, Any]:
    """Draw one call; the first and the last row of the table are always asked for."""
    source = generator(device, seed)
    tokens, vocab, hidden = (case.sizes[n] for n in ("T", "V", "D"))
    dtype = case.formats["activation"]
    token_ids_T = torch.randint(vocab, (tokens,), generator=source, device=device)
    token_ids_T[0] = 0
    token_ids_T[-1] = vocab - 1
    return {
        "token_ids_T": token_ids_T,
        "table_VD": normal(vocab, hidden, source=source, dtype=dtype),
        "out_TD": torch.empty(tokens, hidden, dtype=torch_dtype(dtype), device=device),
    }


def tolerance(case: Case) -> Tolerance:
    """Bits are moved."""
    return EXACT


def flops(case: Case) -> int:
    """None."""
    return 0


def num_bytes(case: Case) -> int:
    """Each row read once, written once."""
    element = BITS_PER_ELEMENT[case.formats["activation"]] // 8
    return case.sizes["T"] * (8 + 2 * case.sizes["D"] * element)
