"""Cases of quantize_activation: gpt-oss rows in groups of 128 and 64, then ragged ends and zeros."""

from __future__ import annotations

from typing import Any

import torch

from rose.kernels.cases import Case, Tolerance
from rose.kernels.draw import generator, normal
from rose.utils.dtypes import BITS_PER_ELEMENT
from rose.utils.math import ceil_div


def _case(
    name: str,
    tokens: int,
    columns: int,
    *,
    group: int = 128,
    dtype: str = "bf16",
    rows: str = "normal",
    is_strided: bool = False,
    **flags: Any,
) -> Case:
    """`rows`: normal, zeros, tiny (under the least amax) or outliers; `is_strided`: rows lie apart."""
    return Case(
        name=name,
        sizes={"D": columns, "T": tokens, "group": group},
        formats={"activation": dtype},
        phase="decode" if tokens <= 256 else "prefill",
        rows=tokens,
        options={"rows": rows, "is_strided": is_strided},
        **flags,
    )


CASES = [
    _case("decode_1", 1, 2880, timed=True),
    _case("decode_128", 128, 2880, timed=True),
    _case("prefill_8192", 8192, 2880, large=True, timed=True),
    _case("prefill_32768", 32768, 2880, large=True, timed=True),
    _case("prefill_8192_group64", 8192, 2880, group=64, large=True, timed=True),
    _case("chosen_rows_32768", 32768, 2880, group=64, large=True, timed=True),
    *(_case(f"rows_{t}", t, 192, dtype="float32") for t in (1, 63, 64, 65, 127, 128, 129)),
    _case("ragged_end", 5, 2880),
    _case("group_64", 5, 2880, group=64),
    _case("narrower_than_a_group", 3, 40),
    _case("zeros", 4, 256, rows="zeros"),
    _case("tiny", 4, 256, rows="tiny", dtype="float32"),
    _case("outliers", 9, 320, rows="outliers"),
    _case("strided", 9, 320, is_strided=True),
    _case("strided_float32", 9, 320, is_strided=True, dtype="float32"),
]


def inputs(case: Case, seed: int, device: str) -> dict[str, Any]:
    """Draw one call."""
    source = generator(device, seed)
    tokens, columns, group = case.sizes["T"], case.sizes["D"], case.sizes["group"]
    scale = {"normal": 1.0, "zeros": 0.0, "tiny": 1e-6, "outliers": 1.0}[case.options["rows"]]
    width = columns + 16 if case.options["is_strided"] else columns
    x_TD = normal(tokens, width, source=source, dtype=case.formats["activation"]) * scale
    x_TD = x_TD[:, :columns]
    if case.options["rows"] == "outliers":
        x_TD[:, ::97] *= 1000
    return {
        "x_TD": x_TD,
        "group": group,
        "values_TD": torch.empty(tokens, columns, dtype=torch.float8_e4m3fn, device=device),
        "scales_TB": torch.empty(tokens, ceil_div(columns, group), device=device),
    }


def tolerance(case: Case) -> Tolerance:
    """Nearly exact: a product with 1 / scale instead of a quotient moves ties by one step."""
    return Tolerance(
        relative=4e-3,
        absolute=7.2e-2,
        reason="one value in a thousand may land one step away (at most 32 of 448) where the quotient was "
        "taken as a product with the inverse",
    )


def flops(case: Case) -> int:
    """One maximum, one product an element."""
    return 2 * case.sizes["T"] * case.sizes["D"]


def num_bytes(case: Case) -> int:
    """The rows read once, written as bytes, and the scales."""
    s = case.sizes
    element = BITS_PER_ELEMENT[case.formats["activation"]] // 8
    return s["T"] * (s["D"] * (element + 1) + 4 * ceil_div(s["D"], s["group"]))
