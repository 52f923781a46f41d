"""Cases of rope_kv_write: gpt-oss steps first, then page ends, dropped tokens and far positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rose.kernels.cases import FLOAT32, Case, Tolerance
from rose.kernels.draw import generator, normal
from rose.kernels.formats import FORMATS
from rose.kernels.paged import draw_kv
from rose.utils.dtypes import BITS_PER_ELEMENT
from rose.utils.math import ceil_div

GPT_OSS = {"H": 64, "G": 8, "D": 64, "L": 64}
SMALL = {"H": 4, "G": 2, "D": 64, "L": 16}
_CONCENTRATION = 1.3465735902799727


def _case(
    name: str,
    tokens: int,
    sizes: dict[str, int] = SMALL,
    *,
    dtype: str = "float32",
    kv: str | None = None,
    positions: int = 4096,
    dropped: float = 0.0,
    magnitude: float = 1.0,
    is_strided: bool = False,
    **flags: Any,
) -> Case:
    """`positions`: rows of the table; `dropped`: share of slots that are -1; `magnitude`: of q, k and v;
    `is_strided`: rows lie apart; `kv`: format of the pages, else that of the activations.
    """
    return Case(
        name=name,
        sizes={**sizes, "T": tokens, "P": positions},
        formats={"activation": dtype, "kv": kv or dtype},
        phase="decode" if tokens <= 256 else "prefill",
        rows=tokens,
        options={"dropped": dropped, "magnitude": magnitude, "is_strided": is_strided},
        **flags,
    )


CASES = [
    *(
        _case(f"gpt_oss_{t}", t, GPT_OSS, dtype="bf16", positions=131072, large=True, timed=True)
        for t in (1, 8, 32, 128, 8192, 32768)
    ),
    *(
        _case(
            f"fp8_kv_gpt_oss_{t}",
            t,
            GPT_OSS,
            dtype="bf16",
            kv="fp8_e4m3",
            positions=131072,
            large=True,
            timed=True,
        )
        for t in (1, 32, 128, 8192)
    ),
    *(_case(f"rows_{t}", t) for t in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129)),
    _case("half_dropped", 40, dropped=0.5),
    _case("all_dropped", 7, dropped=1.0),
    _case("strided", 20, is_strided=True),
    _case("one_kv_head", 20, {**SMALL, "G": 1}),
    _case("head_32", 20, {**SMALL, "D": 32}),
    _case("head_16_page_64", 70, {**SMALL, "D": 16, "L": 64}),
    _case("bf16", 33, dtype="bf16", dropped=0.3),
    _case("bf16_gpt_oss", 65, GPT_OSS, dtype="bf16", is_strided=True),
    _case("float64", 9, dtype="float64"),
    _case("fp8_kv", 33, dropped=0.3, kv="fp8_e4m3"),
    _case("fp8_kv_saturates", 33, magnitude=300.0, kv="fp8_e4m3"),
    _case("fp8_kv_subnormal", 33, magnitude=2.0**-8, kv="fp8_e4m3"),
    _case("fp8_kv_head_32", 20, {**SMALL, "D": 32}, is_strided=True, kv="fp8_e4m3"),
    _case("fp8_kv_bf16_gpt_oss", 65, GPT_OSS, dtype="bf16", is_strided=True, kv="fp8_e4m3"),
    _case("far_positions", 9, GPT_OSS, dtype="bf16", positions=131072, large=True),
]


def inputs(case: Case, seed: int, device: str) -> dict[str, Any]:
    """Draw one call: slots all different, in disorder; positions all over the table."""
    source = generator(device, seed)
    s, dtype, magnitude = case.sizes, case.formats["activation"], case.options["magnitude"]
    tokens, head_dim, page_tokens = s["T"], s["D"], s["L"]
    columns = (s["H"] + 2 * s["G"]) * head_dim
    width = columns + (64 if case.options["is_strided"] else 0)
    num_pages = ceil_div(tokens, page_tokens) + 2
    slots_T = torch.randperm(num_pages * page_tokens, generator=source, device=device)[:tokens]
    is_dropped_T = torch.rand(tokens, generator=source, device=device) < case.options["dropped"]
    wide = torch.float64 if dtype == "float64" else torch.float32
    pairs = torch.arange(head_dim // 2, device=device)
    angles_PC = torch.outer(
        torch.arange(s["P"], device=device).double(), 150000.0 ** (-pairs.double() / len(pairs))
    )
    return {
        "qkv_TF": normal(tokens, width, source=source, dtype=dtype, scale=magnitude)[:, :columns],
        "positions_T": torch.randint(s["P"], (tokens,), generator=source, device=device),
        "cos_sin_PD": (torch.cat([angles_PC.cos(), angles_PC.sin()], 1) * _CONCENTRATION).to(wide),
        "slots_T": slots_T.masked_fill(is_dropped_T, -1),
        "kv_pages": draw_kv(
            num_pages, 2, s["G"], page_tokens, head_dim,
            kv_format=case.formats["kv"], source=source, scale=magnitude,
        ),
    }  # fmt: skip


def promised(case: Case, name: str, tensor: Tensor) -> Tensor:
    """The k part of qkv_TF may hold anything afterwards."""
    if name != "qkv_TF":
        return tensor
    heads, kv_heads = case.sizes["H"], case.sizes["G"]
    parts = tensor.unflatten(1, (-1, case.sizes["D"]))
    return torch.cat([parts[:, :heads], parts[:, heads + kv_heads :]], dim=1)


def tolerance(case: Case) -> Tolerance:
    """One rounding of each rotated number; q and pages of the reference are rounded likewise."""
    if case.formats["kv"] == "fp8_e4m3":
        return Tolerance(
            relative=1e-3,
            absolute=1.3e-1,
            reason="one value in ten thousand one E4M3 step away, an eighth of a power of two, where fused products "
            "fall on the other side; q is held tighter by the other cases, the same code",
        )
    if case.formats["activation"] == "bf16":
        return Tolerance(
            relative=1e-3,
            absolute=8e-3,
            reason="both round once to bf16; sums in another order (or fused) flip a few in a thousand",
        )
    return FLOAT32


def flops(case: Case) -> int:
    """Three operations per rotated element."""
    s = case.sizes
    return 3 * s["T"] * (s["H"] + s["G"]) * s["D"]


def num_bytes(case: Case) -> int:
    """q, k and v read once, written once, and the table rows (float32)."""
    s = case.sizes
    element = BITS_PER_ELEMENT[case.formats["activation"]] // 8
    kv_element = BITS_PER_ELEMENT[FORMATS[case.formats["kv"]].element] // 8
    per_number = 2 * element * s["H"] + 2 * (element + kv_element) * s["G"]
    return s["T"] * s["D"] * (per_number + 4)
