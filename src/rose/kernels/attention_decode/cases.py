"""Cases of attention_decode: gpt-oss batches first, then window and page boundaries, padding rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rose.kernels.cases import Case, Tolerance
from rose.kernels.draw import generator, normal
from rose.kernels.formats import FORMATS
from rose.kernels.paged import draw_pages
from rose.utils.dtypes import BITS_PER_ELEMENT, torch_dtype

GPT_OSS = {"H": 64, "G": 8, "D": 64, "L": 64}
SMALL = {"H": 4, "G": 2, "D": 64, "L": 16}


def _case(
    name: str,
    lengths: Sequence[int],
    sizes: dict[str, int] = SMALL,
    *,
    window: int | None = None,
    dtype: str = "float32",
    kv: str | None = None,
    is_strided: bool = False,
    sink: float = 0.0,
    max_length: int | None = None,
    **flags: Any,
) -> Case:
    """`max_length`: what the launch may rely on, at least the longest; `is_strided`: q inside a qkv; `kv`: format of
    the pages, else that of the activations.
    """
    return Case(
        name=name,
        sizes={**sizes, "S": len(lengths)},
        formats={"activation": dtype, "kv": kv or dtype},
        phase="decode",
        rows=len(lengths),
        options={
            "lengths": tuple(lengths),
            "window": window,
            "is_strided": is_strided,
            "sink": sink,
            "max_length": max_length or max(lengths),
        },
        **flags,
    )


def _timed() -> list[Case]:
    return [
        _case(
            f"{prefix}{kind}_{batch}x{context}",
            [context] * batch,
            GPT_OSS,
            window=window,
            dtype="bf16",
            is_strided=True,
            large=True,
            timed=True,
            kv=kv,
        )
        for prefix, kv in (("", None), ("fp8_kv_", "fp8_e4m3"))
        for context in (8192, 32768)
        for batch in (1, 8, 32, 128)
        for kind, window in (("full", None), ("window", 128))
    ]


def _fp8_kv() -> list[Case]:
    """Pages in E4M3: the edges of the kernels that read them, under both types of activations."""
    return [
        _case("fp8_kv_ragged", [1, 200, 16, 17, 64, 3], kv="fp8_e4m3"),
        _case("fp8_kv_window", [0, 127, 128, 129, 300], window=128, kv="fp8_e4m3"),
        _case("fp8_kv_window_8", [7, 8, 9, 65], window=8, is_strided=True, kv="fp8_e4m3"),
        _case("fp8_kv_split", [3, 0, 700], max_length=1000, kv="fp8_e4m3"),
        _case("fp8_kv_sink_wins", [21, 50], sink=8.0, kv="fp8_e4m3"),
        _case("fp8_kv_head_32", [21, 50], {**SMALL, "D": 32}, kv="fp8_e4m3"),
        _case("fp8_kv_head_16", [21, 50], {**SMALL, "D": 16}, kv="fp8_e4m3"),
        _case("fp8_kv_bf16", [100, 9], dtype="bf16", kv="fp8_e4m3"),
        *(
            _case(
                f"fp8_kv_gpt_oss_{kind}", [1, 70, 300, 0, 129], GPT_OSS,
                window=window, dtype="bf16", is_strided=True, kv="fp8_e4m3",
            )
            for kind, window in (("full", None), ("window", 128))
        ),
    ]  # fmt: skip


CASES = [
    *_timed(),
    *(_case(f"full_{n}", [n]) for n in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129)),
    *(_case(f"window_8_of_{n}", [n], window=8) for n in (1, 7, 8, 9, 16, 17, 24, 65)),
    _case("window_128", [1, 127, 128, 129, 300], window=128),
    _case("window_of_a_page", [15, 16, 17, 31, 32, 33], window=16),
    _case("ragged", [1, 200, 16, 17, 64, 3]),
    _case("padding_rows", [0, 5, 0, 40, 0]),
    _case("padding_rows_window", [0, 5, 0, 40, 0], window=8),
    _case("only_padding", [0, 0], max_length=64),
    _case("bound_above_lengths", [3, 70], max_length=1000),
    _case("bound_above_lengths_window", [3, 70], window=24, max_length=1000),
    _case("strided", [30, 7, 50], is_strided=True),
    _case("one_kv_head", [21, 50], {**SMALL, "G": 1}),
    _case("head_32", [21, 50], {**SMALL, "D": 32}),
    _case("sink_wins", [21, 50], sink=8.0),
    _case("sink_lost", [21, 50], sink=-30.0),
    _case("bf16", [100, 9], dtype="bf16"),
    _case("bf16_gpt_oss", [1, 70, 200, 0, 64], GPT_OSS, dtype="bf16", is_strided=True),
    _case("bf16_gpt_oss_window", [1, 70, 300, 0, 129], GPT_OSS, window=128, dtype="bf16"),
    _case("float64", [12, 30], dtype="float64"),
    *(
        _case(
            f"gpt_oss_ragged_{kind}",
            [1, 8192, 0, 100, 64, 65, 20000, 4097, 127, 128, 129, 0, 3000],
            GPT_OSS,
            window=window,
            dtype="bf16",
            is_strided=True,
            max_length=131072,
            large=True,
        )
        for kind, window in (("full", None), ("window", 128))
    ),
    *_fp8_kv(),
    _case("gpt_oss_131072", [131072, 5], GPT_OSS, dtype="bf16", is_strided=True, large=True),
]


def inputs(case: Case, seed: int, device: str) -> dict[str, Any]:
    """Draw one call; scores as in attention_prefill."""
    source = generator(device, seed)
    lengths, window = case.options["lengths"], case.options["window"]
    dtype, (heads, kv_heads, head_dim) = case.formats["activation"], (case.sizes[n] for n in "HGD")
    kv_pages, page_table_SP = draw_pages(
        lengths,
        [max(0, n - 1) for n in lengths],
        page_tokens=case.sizes["L"],
        kv_heads=kv_heads,
        head_dim=head_dim,
        window_tokens=window,
        kv_format=case.formats["kv"],
        source=source,
    )
    width = heads + (2 * kv_heads if case.options["is_strided"] else 0)
    q_SHD = normal(len(lengths), width * head_dim, source=source, dtype=dtype, scale=2.0)
    wide = "float64" if dtype == "float64" else "float32"
    return {
        "q_SHD": q_SHD[:, : heads * head_dim].unflatten(1, (heads, head_dim)),
        "kv_pages": kv_pages,
        "page_table_SP": page_table_SP,
        "lengths_S": torch.tensor(lengths, dtype=torch.int32, device=device),
        "sinks_H": normal(heads, source=source, dtype=wide) + case.options["sink"],
        "scale": head_dim**-0.5,
        "window_tokens": window,
        "max_length": case.options["max_length"],
        "out_SHD": torch.empty(
            len(lengths), heads, head_dim, dtype=torch_dtype(dtype), device=device
        ),
    }


def tolerance(case: Case) -> Tolerance:
    """Roundings of softmax weights and results; pages in E4M3 are read exactly, by the reference too."""
    if case.formats["activation"] == "bf16":
        return Tolerance(
            relative=6e-3,
            absolute=1.2e-2,
            reason="softmax weights rounded to bf16 (2^-9 each) before the product with v, and one rounding of "
            "the result; parts of a split history are merged in float32",
        )
    return Tolerance(
        relative=3e-6,
        absolute=2e-5,
        reason="float32 exponentials of scores up to 20 (one part in 2^24 of the score each), sums of up to a "
        "few hundred terms in another order",
    )


def _keys(case: Case) -> int:
    window = case.options["window"]
    return sum(n if window is None else min(n, window) for n in case.options["lengths"])


def flops(case: Case) -> int:
    """Two products of D for each visible key and query head."""
    return 4 * _keys(case) * case.sizes["H"] * case.sizes["D"]


def num_bytes(case: Case) -> int:
    """Every visible key and value once, queries in and out."""
    s = case.sizes
    element = BITS_PER_ELEMENT[case.formats["activation"]] // 8
    kv_element = BITS_PER_ELEMENT[FORMATS[case.formats["kv"]].element] // 8
    return s["D"] * (2 * element * s["S"] * s["H"] + 2 * kv_element * _keys(case) * s["G"])
