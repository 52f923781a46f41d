"""Cases of gemm: the projections and the head of gpt-oss first, then odd rows and every format."""

from __future__ import annotations

from typing import Any

import torch

from rose.kernels.cases import BF16_OUT, FLOAT32, Case, Tolerance
from rose.kernels.draw import generator, matrix, normal
from rose.kernels.formats import FORMATS
from rose.kernels.weights import LinearWeights
from rose.utils.dtypes import BITS_PER_ELEMENT, torch_dtype

QKV = {"N": 5120, "K": 2880}
OUT = {"N": 2880, "K": 4096}
HEAD = {"N": 201088, "K": 2880}
SMALL = {"N": 96, "K": 64}
SMALL_RAGGED = {"N": 192, "K": 320}


def make_case(
    name: str,
    tokens: int,
    sizes: dict[str, int],
    *,
    activation: str = "bf16",
    weight: str = "bf16",
    out: str | None = None,
    bias: bool = True,
    residual: str | None = None,
    is_strided: bool = False,
    **flags: Any,
) -> Case:
    """Return a case.

    `residual`: None, apart or in_place; `is_strided`: rows of x lie apart.
    """
    return Case(
        name=name,
        sizes={**sizes, "T": tokens},
        formats={"activation": activation, "weight": weight},
        phase=flags.pop("phase", "decode" if tokens <= 256 else "prefill"),
        rows=tokens,
        options={
            "out": out or activation,
            "bias": bias,
            "residual": residual,
            "is_strided": is_strided,
        },
        **flags,
    )


def _timed() -> list[Case]:
    cases = []
    for weight in ("bf16", "fp8_block"):
        tag = "" if weight == "bf16" else f"_{weight}"
        for tokens in (1, 8, 32, 128, 8192):
            flags: dict[str, Any] = {"weight": weight, "large": True, "timed": True}
            cases += [
                make_case(f"qkv{tag}_{tokens}", tokens, QKV, **flags),
                make_case(f"out{tag}_{tokens}", tokens, OUT, residual="in_place", **flags),
            ]
            if tokens <= 128:
                head = {"out": "float32", "bias": False}
                cases.append(make_case(f"head{tag}_{tokens}", tokens, HEAD, **head, **flags))
    return cases


BF16_TO_FLOAT32 = Tolerance(
    relative=1e-5,
    absolute=2e-5,
    reason="tensor cores cut the low bits of each float32 addition instead of rounding: K / 16 = 180 additions "
    "lose up to 2^-23 each in one direction; cuBLAS measured 3.1e-6 on an H200",
)

CASES = [
    *_timed(),
    *(make_case(f"rows_{t}", t, SMALL, activation="float32", weight="float32") for t in (1, 2, 17)),
    *(
        make_case(
            f"rows_{t}", t, SMALL, activation="float32", weight="float32", residual="in_place"
        )
        for t in (63, 64, 65, 127, 128, 129)
    ),
    *(
        make_case(f"{weight}_weights", 33, SMALL_RAGGED, activation="float32", weight=weight)
        for weight in ("float32", "bf16", "fp8_block", "mxfp4")
    ),
    *(
        make_case(f"bf16_by_{weight}", 33, SMALL_RAGGED, weight=weight, residual="apart")
        for weight in ("bf16", "fp8_block", "mxfp4")
    ),
    make_case("no_bias", 5, SMALL, activation="float32", weight="float32", bias=False),
    make_case("residual", 5, SMALL, activation="float32", weight="float32", residual="apart"),
    make_case("logits", 3, {"N": 1000, "K": 64}, out="float32", bias=False),
    make_case("strided", 9, SMALL, activation="float32", weight="float32", is_strided=True),
    make_case("strided_bf16", 9, SMALL, is_strided=True),
    make_case("odd_sizes", 7, {"N": 50, "K": 40}, activation="float32", weight="float32"),
    make_case("bf16_residual_in_place", 40, SMALL, residual="in_place"),
    make_case("float64", 6, SMALL, activation="float64", weight="float64"),
    make_case("qkv_129", 129, QKV, large=True),
    make_case("out_fp8_1000", 1000, OUT, weight="fp8_block", residual="apart", large=True),
]


def inputs(case: Case, seed: int, device: str) -> dict[str, Any]:
    """Draw one call."""
    source = generator(device, seed)
    s, activation = case.sizes, case.formats["activation"]
    tokens, width = s["T"], s["K"] + (16 if case.options["is_strided"] else 0)
    out_TN = torch.empty(tokens, s["N"], dtype=torch_dtype(case.options["out"]), device=device)
    bias_N = normal(s["N"], source=source, dtype=activation) if case.options["bias"] else None
    residual_TN = None
    if case.options["residual"] == "apart":
        residual_TN = normal(tokens, s["N"], source=source, dtype=activation)
    elif case.options["residual"] == "in_place":
        residual_TN = out_TN.copy_(normal(tokens, s["N"], source=source, dtype=activation))
    return {
        "x_TK": normal(tokens, width, source=source, dtype=activation)[:, : s["K"]],
        "weights": LinearWeights(
            matrix=matrix(case.formats["weight"], s["N"], s["K"], source=source), bias_N=bias_N
        ),
        "residual_TN": residual_TN,
        "out_TN": out_TN,
    }


def tolerance(case: Case) -> Tolerance:
    """One rounding on the way out, none of logits."""
    if case.options["out"] != "bf16":
        return FLOAT32 if case.formats["activation"] != "bf16" else BF16_TO_FLOAT32
    if case.options["residual"] is None and not case.options["bias"]:
        return BF16_OUT
    return Tolerance(
        relative=6e-3,
        absolute=1.2e-2,
        reason="one rounding of the result to bf16, and one of the product where a library adds bias and "
        "residual after it",
    )


def rounded_tolerance(case: Case, rounding: tuple[str, ...]) -> Tolerance:
    """Against the reference with the same rounding of x."""
    base = tolerance(case)
    return Tolerance(
        relative=base.relative + 4e-3,
        absolute=base.absolute + 8e-3,
        reason=base.reason
        + "; a few values of x in a thousand land one E4M3 step away where the scale was "
        "inverted first; tensor cores add E4M3 products with 14 bits or more between promotions",
    )


def flops(case: Case) -> int:
    """Two operations per weight and row."""
    return 2 * case.sizes["T"] * case.sizes["N"] * case.sizes["K"]


def num_bytes(case: Case) -> int:
    """The matrix once, rows in, rows out, the residual."""
    s = case.sizes
    element = BITS_PER_ELEMENT[case.formats["activation"]] // 8
    out = BITS_PER_ELEMENT[case.options["out"]] // 8 + (element if case.options["residual"] else 0)
    matrix_bytes = FORMATS[case.formats["weight"]].num_bytes(s["N"], s["K"])
    return matrix_bytes + s["T"] * (s["K"] * element + s["N"] * out)
