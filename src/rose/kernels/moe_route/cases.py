"""Cases of moe_route: 20b and 120b routers first, then ties, one choice and odd rows.

Inputs are small integers over powers of two, so that every logit is exact in float32 whatever the order of
its sum: the chosen experts compare exactly, and equal logits really are equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rose.kernels.cases import Case, Tolerance
from rose.kernels.draw import generator
from rose.kernels.formats import plain
from rose.kernels.weights import LinearWeights
from rose.utils.dtypes import BITS_PER_ELEMENT, torch_dtype

GPT_OSS_20B = {"D": 2880, "E": 32, "K": 4}
GPT_OSS_120B = {"D": 2880, "E": 128, "K": 4}
SMALL = {"D": 64, "E": 8, "K": 2}


def _case(
    name: str,
    tokens: int,
    sizes: dict[str, int] = SMALL,
    *,
    activation: str = "float32",
    weight: str | None = None,
    is_tied: bool = False,
    **flags: Any,
) -> Case:
    """`weight`: dtype of the matrix, the activation's by default; `is_tied`: all experts in equal pairs."""
    return Case(
        name=name,
        sizes={**sizes, "T": tokens},
        formats={"activation": activation, "weight": weight or activation},
        phase="decode" if tokens <= 256 else "prefill",
        rows=tokens,
        options={"is_tied": is_tied},
        **flags,
    )


def _timed() -> list[Case]:
    return [
        _case(f"{size}_{t}", t, sizes, activation="bf16", large=t > 128, timed=True)
        for size, sizes in (("20b", GPT_OSS_20B), ("120b", GPT_OSS_120B))
        for t in (1, 8, 32, 128, 8192, 32768)
    ]


CASES = [
    *_timed(),
    *(_case(f"rows_{t}", t) for t in (1, 63, 64, 65, 127, 128, 129)),
    _case("one_choice", 9, {**SMALL, "K": 1}),
    _case("all_experts", 9, {**SMALL, "E": 4, "K": 4}),
    _case("odd_experts", 9, {"D": 96, "E": 5, "K": 3}),
    _case("ties", 50, {**SMALL, "K": 3}, is_tied=True),
    _case("ties_bf16", 50, GPT_OSS_20B, activation="bf16", is_tied=True),
    _case("float32_matrix", 33, GPT_OSS_20B, activation="bf16", weight="float32"),
    _case("float64", 9, activation="float64"),
]


def _integers(*shape: int, bound: int, scale: float, source: torch.Generator, dtype: str) -> Tensor:
    numbers = torch.randint(-bound, bound + 1, shape, generator=source, device=source.device)
    return (numbers * scale).to(torch_dtype(dtype))


def inputs(case: Case, seed: int, device: str) -> dict[str, Any]:
    """Draw one call; logits are multiples of 2^-7 (narrow rows: 2^-4), a few units wide."""
    source = generator(device, seed)
    tokens, hidden, experts, chosen = (case.sizes[n] for n in ("T", "D", "E", "K"))
    activation, weight = case.formats["activation"], case.formats["weight"]
    step = 2.0**-7 if hidden > 1000 else 2.0**-4
    matrix_ED = _integers(experts, hidden, bound=4, scale=step, source=source, dtype=weight)
    bias_E = _integers(experts, bound=32, scale=step, source=source, dtype=weight)
    if case.options["is_tied"]:
        matrix_ED[1::2], bias_E[1::2] = matrix_ED[0::2].clone(), bias_E[0::2].clone()
    return {
        "x_TD": _integers(tokens, hidden, bound=2, scale=1.0, source=source, dtype=activation),
        "weights": LinearWeights(matrix=plain(matrix_ED), bias_N=bias_E),
        "expert_ids_TK": torch.empty(tokens, chosen, dtype=torch.int32, device=device),
        "expert_weights_TK": torch.empty(
            tokens, chosen, dtype=torch_dtype(activation), device=device
        ),
    }


def tolerance(case: Case) -> Tolerance:
    """Ids compare exactly; this is for the weights."""
    if case.formats["activation"] == "bf16":
        return Tolerance(
            relative=3e-3, absolute=4e-3, reason="one rounding of weights below 1 to bf16"
        )
    return Tolerance(
        relative=2e-6,
        absolute=4e-6,
        reason="exact logits, then float32 exponentials and a quotient",
    )


def flops(case: Case) -> int:
    """Two operations per weight and row."""
    return 2 * case.sizes["T"] * case.sizes["D"] * case.sizes["E"]


def num_bytes(case: Case) -> int:
    """The matrix and the rows once, ids and weights out."""
    s = case.sizes
    element = BITS_PER_ELEMENT[case.formats["activation"]] // 8
    matrix_bytes = s["E"] * (s["D"] + 1) * BITS_PER_ELEMENT[case.formats["weight"]] // 8
    return matrix_bytes + s["T"] * (s["D"] * element + s["K"] * (4 + element))
