"""Cases of attention_prefill: gpt-oss prompts first, then window and page boundaries and ragged chunks."""

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


def make_case(
    name: str,
    chunks: Sequence[tuple[int, int]],
    sizes: dict[str, int] = SMALL,
    *,
    window: int | None = None,
    dtype: str = "float32",
    kv: str | None = None,
    is_strided: bool = False,
    sink: float = 0.0,
    **flags: Any,
) -> Case:
    """Return a case.

    `chunks`: (new tokens, length with them) of each sequence; `is_strided`: q inside a wider qkv; `kv`: format of
    the pages, else that of the activations.
    """
    return Case(
        name=name,
        sizes={**sizes, "T": sum(new for new, _ in chunks), "S": len(chunks)},
        formats={"activation": dtype, "kv": kv or dtype},
        phase="prefill",
        rows=sum(new for new, _ in chunks),
        options={
            "chunks": tuple(chunks),
            "window": window,
            "is_strided": is_strided,
            "sink": sink,
        },
        **flags,
    )


def _timed() -> list[Case]:
    prompts = {
        "2048": [(2048, 2048)],
        "8192": [(8192, 8192)],
        "32768": [(32768, 32768)],
        "8x1024": [(1024, 1024)] * 8,
        "chunk_2048_of_32768": [(2048, 32768)],
    }
    return [
        make_case(
            f"{prefix}{kind}_{name}",
            chunks,
            GPT_OSS,
            window=window,
            dtype="bf16",
            is_strided=True,
            large=True,
            timed=True,
            kv=kv,
        )
        for prefix, kv in (("", None), ("fp8_kv_", "fp8_e4m3"))
        for name, chunks in prompts.items()
        for kind, window in (("full", None), ("window", 128))
    ]


def _fp8_kv() -> list[Case]:
    """Pages in E4M3: the edges of the kernels that read them, under both types of activations."""
    ragged = [(1, 140), (33, 33), (5, 90), (16, 160), (2, 17), (64, 128)]
    return [
        make_case("fp8_kv_ragged", ragged, kv="fp8_e4m3"),
        make_case("fp8_kv_ragged_window", ragged, window=32, is_strided=True, kv="fp8_e4m3"),
        make_case("fp8_kv_chunk", [(20, 77), (1, 64), (1, 65)], kv="fp8_e4m3"),
        make_case("fp8_kv_sink_wins", [(21, 50)], sink=8.0, kv="fp8_e4m3"),
        make_case("fp8_kv_head_32", [(21, 50)], {**SMALL, "D": 32}, kv="fp8_e4m3"),
        make_case("fp8_kv_bf16", [(40, 100), (9, 9)], dtype="bf16", kv="fp8_e4m3"),
        *(
            make_case(
                f"fp8_kv_gpt_oss_{kind}", [(70, 300), (1, 1), (64, 64)], GPT_OSS,
                window=window, dtype="bf16", is_strided=True, kv="fp8_e4m3",
            )
            for kind, window in (("full", None), ("window", 128))
        ),
    ]  # fmt: skip


_LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129)

CASES = [
    *_timed(),
    *(make_case(f"full_{n}", [(n, n)]) for n in _LENGTHS),
    *(make_case(f"window_8_of_{n}", [(n, n)], window=8) for n in (1, 7, 8, 9, 16, 17, 65)),
    make_case("window_128", [(300, 300)], window=128),
    make_case("window_of_a_page", [(65, 65)], window=16),
    make_case("chunk", [(20, 77)]),
    make_case("chunk_in_window", [(20, 177)], window=24),
    make_case("one_token_chunk", [(1, 64), (1, 65)]),
    make_case("ragged", [(1, 1), (33, 33), (5, 90), (16, 16), (2, 17), (64, 128)]),
    make_case(
        "ragged_window", [(1, 140), (33, 33), (5, 90), (16, 160), (2, 17), (64, 128)], window=32
    ),
    make_case("strided", [(19, 40), (7, 7)], is_strided=True),
    make_case("one_kv_head", [(21, 50)], {**SMALL, "G": 1}),
    make_case("one_query_head_each", [(21, 50)], {**SMALL, "H": 2, "G": 2}),
    make_case("head_32", [(21, 50)], {**SMALL, "D": 32}),
    make_case("sink_wins", [(21, 50)], sink=8.0),
    make_case("sink_lost", [(21, 50)], sink=-30.0),
    make_case("bf16", [(40, 100), (9, 9)], dtype="bf16"),
    make_case(
        "bf16_gpt_oss", [(70, 200), (1, 1), (64, 64)], GPT_OSS, dtype="bf16", is_strided=True
    ),
    make_case("bf16_gpt_oss_window", [(70, 300), (129, 129)], GPT_OSS, window=128, dtype="bf16"),
    *(
        make_case(
            f"bf16_gpt_oss_window_{n}", [(70, 300), (9, 140)], GPT_OSS, window=n, dtype="bf16"
        )
        for n in (50, 129, 130)
    ),
    make_case("float64", [(12, 30)], dtype="float64"),
    *_fp8_kv(),
    make_case(
        "gpt_oss_ragged",
        [(1, 1), (1000, 5000), (129, 129), (64, 8192), (3000, 3000)],
        GPT_OSS,
        dtype="bf16",
        is_strided=True,
        large=True,
    ),
    make_case(
        "gpt_oss_ragged_window",
        [(1, 1), (1000, 5000), (129, 129), (64, 8192), (3000, 3000)],
        GPT_OSS,
        window=128,
        dtype="bf16",
        is_strided=True,
        large=True,
    ),
]


def inputs(case: Case, seed: int, device: str) -> dict[str, Any]:
    """Draw one call; scores are a few units wide, so that the softmax is neither flat nor one-hot."""
    source = generator(device, seed)
    chunks, window = case.options["chunks"], case.options["window"]
    dtype, (heads, kv_heads, head_dim) = case.formats["activation"], (case.sizes[n] for n in "HGD")
    tokens = case.sizes["T"]
    kv_pages, page_table_SP = draw_pages(
        [length for _, length in chunks],
        [length - new for new, length in chunks],
        page_tokens=case.sizes["L"],
        kv_heads=kv_heads,
        head_dim=head_dim,
        window_tokens=window,
        kv_format=case.formats["kv"],
        source=source,
    )
    width = heads + (2 * kv_heads if case.options["is_strided"] else 0)
    q_THD = normal(tokens, width * head_dim, source=source, dtype=dtype, scale=2.0)
    q_THD = q_THD[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    news = torch.tensor([0, *(new for new, _ in chunks)])
    wide = "float64" if dtype == "float64" else "float32"
    return {
        "q_THD": q_THD,
        "kv_pages": kv_pages,
        "page_table_SP": page_table_SP,
        "query_starts_S1": news.cumsum(0).int().to(device),
        "lengths_S": torch.tensor([n for _, n in chunks], dtype=torch.int32, device=device),
        "sinks_H": normal(heads, source=source, dtype=wide) + case.options["sink"],
        "scale": head_dim**-0.5,
        "window_tokens": window,
        "max_query_tokens": max(new for new, _ in chunks),
        "out_THD": torch.empty(tokens, heads, head_dim, dtype=torch_dtype(dtype), device=device),
    }


def tolerance(case: Case) -> Tolerance:
    """Roundings of softmax weights and results; pages in E4M3 are read exactly, by the reference too."""
    if case.formats["activation"] == "bf16":
        return Tolerance(
            relative=6e-3,
            absolute=1.2e-2,
            reason="softmax weights rounded to bf16 (2^-9 each) before the product with v, and one rounding of "
            "the result; absolute against the largest output, which few keys make",
        )
    return Tolerance(
        relative=3e-6,
        absolute=2e-5,
        reason="float32 exponentials of scores up to 20 (one part in 2^24 of the score each), sums of up to a "
        "few hundred terms in another order",
    )


def _seen(new: int, length: int, window: int | None) -> int:
    """Return how many (query, key) pairs a chunk has."""
    first = length - new + 1
    if window is None or length <= window:
        return (first + length) * new // 2
    full = max(0, window - first)  # queries that still see everything
    return (first + window - 1) * full // 2 + (new - full) * window


def flops(case: Case) -> int:
    """Two products of D for each visible pair and query head."""
    pairs = sum(_seen(n, length, case.options["window"]) for n, length in case.options["chunks"])
    return 4 * pairs * case.sizes["H"] * case.sizes["D"]


def num_bytes(case: Case) -> int:
    """Queries in and out, and every reachable key and value once."""
    s, window = case.sizes, case.options["window"]
    keys = sum(
        length if window is None else min(length, new + window - 1)
        for new, length in case.options["chunks"]
    )
    element = BITS_PER_ELEMENT[case.formats["activation"]] // 8
    kv_element = BITS_PER_ELEMENT[FORMATS[case.formats["kv"]].element] // 8
    return s["D"] * (2 * element * s["T"] * s["H"] + 2 * kv_element * keys * s["G"])
