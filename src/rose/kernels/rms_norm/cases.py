"""Cases of rms_norm: gpt-oss rows first, then small and odd sizes."""

from __future__ import annotations

from typing import Any

import torch

from rose.kernels.cases import BF16_OUT, FLOAT32, Case, Tolerance
from rose.utils.dtypes import torch_dtype


def make_case(
    name: str,
    tokens: int,
    hidden: int,
    *,
    dtype: str = "bf16",
    residual: bool = True,
    eps: float = 1e-5,
    size: float = 1.0,
    **flags: Any,
) -> Case:
    """Return a case.

    `size`: standard deviation of x; a third of that of the residual.
    """
    return Case(
        name=name,
        sizes={"D": hidden, "T": tokens},
        formats={"activation": dtype},
        phase="decode" if tokens <= 512 else "prefill",
        rows=tokens,
        options={"residual": residual, "eps": eps, "size": size},
        **flags,
    )


CASES = [
    make_case("decode_1", 1, 2880, timed=True),
    make_case("decode_128", 128, 2880, timed=True),
    make_case("prefill_8192", 8192, 2880, large=True, timed=True),
    make_case("first_layer", 65, 2880, residual=False),
    make_case("float32", 33, 2880, dtype="float32"),
    make_case("small", 3, 64, dtype="float32"),
    # Rows so small that eps decides, and an eps that gpt-oss does not have.
    *(
        make_case(f"small_numbers_{d}", 5, 64, dtype=d, eps=3e-4, size=1e-2)
        for d in ("float32", "bf16")
    ),
    make_case("odd_width", 5, 200),
]


def inputs(case: Case, seed: int, device: str) -> dict[str, Any]:
    """Draw one call."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch_dtype(case.formats["activation"])
    shape, size = (case.sizes["T"], case.sizes["D"]), case.options["size"]

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device)

    return {
        "x_TD": (size * normal(*shape)).to(dtype),
        "weight_D": 1 + 0.3 * normal(shape[1]),
        "eps": case.options["eps"],
        "residual_TD": (3 * size * normal(*shape)).to(dtype) if case.options["residual"] else None,
        "out_TD": torch.empty(shape, dtype=dtype, device=device),
    }


def tolerance(case: Case) -> Tolerance:
    """One rounding on the way out."""
    return BF16_OUT if case.formats["activation"] == "bf16" else FLOAT32


def flops(case: Case) -> int:
    """Four operations an element."""
    return 4 * case.sizes["T"] * case.sizes["D"]


def num_bytes(case: Case) -> int:
    """Two reads and two writes of the rows (one each without a residual), one of the weight."""
    element = 2 if case.formats["activation"] == "bf16" else 4
    passes = 4 if case.options["residual"] else 2
    return case.sizes["D"] * (passes * element * case.sizes["T"] + 4)
