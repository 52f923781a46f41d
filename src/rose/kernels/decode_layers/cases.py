"""Cases of decode_layers: whole models first, then few blocks of gpt-oss's sizes, then small ones at the edges.

Which experts a token gets is decided by the case and not by rounding. An eighth of the columns of the residual stream,
drawn anew for each case, is *quiet*: no block writes there, so what the embedding put there stays to the bit. The
router reads these columns with large weights, made so that the chosen experts' logits lie well above all others, and
the other columns with small ones. What rounding does elsewhere moves logits by a hundredth of their distance, so every
right implementation chooses the same experts (`tests/kernels/test_decode_layers.py` holds the cases to it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rose.kernels.cases import Case, Tolerance
from rose.kernels.decode_layers.contract import MAX_SEQUENCES
from rose.kernels.draw import expected_experts, generator, matrix, normal, routing
from rose.kernels.formats import FORMATS, plain
from rose.kernels.paged import JUNK, draw_kv, draw_pages
from rose.kernels.weights import BlockWeights, ExpertWeights, LinearWeights, StackWeights
from rose.utils.dtypes import BITS_PER_ELEMENT, torch_dtype
from rose.utils.math import ceil_div

_HEADS = {"H": 64, "G": 8, "A": 64, "R": 1}
GPT_OSS_20B = {"D": 2880, "I": 2880, "E": 32, "K": 4, "L": 64, **_HEADS}
GPT_OSS_120B = {**GPT_OSS_20B, "E": 128}
SMALL = {"D": 96, "I": 64, "H": 4, "G": 2, "A": 16, "E": 8, "K": 2, "L": 16, "R": 1}
MODEL = {**SMALL, "D": 192, "I": 128, "H": 16, "A": 64, "E": 32, "K": 4}
"""What the CUDA kernel is compiled for where it runs on threads of a CPU, in tests."""
ALTERNATING = ("window", "full")
FEW_BLOCKS = 5
_STEP = 0.5
"""Between the aimed logits of a token's chosen experts, before the norm shrinks them."""
_ABOVE = 12.0
"""Of the last chosen above all that are not."""
_ABOVE_TIMED = 96.0
_SHARE_TIMED = 0.125
"""Of what a half-block adds otherwise. Timing runs a case dozens of times, each on the stream that the last one left;
as that grows, norms shrink the quiet columns, and the choice of experts must not change."""


def make_case(
    name: str,
    lengths: Sequence[int],
    sizes: dict[str, int] = SMALL,
    *,
    kinds: Sequence[str] = ALTERNATING,
    window: int = 128,
    activation: str = "bf16",
    weight: str = "mxfp4",
    chosen: str = "spread",
    is_strided: bool = False,
    sink: float = 0.0,
    large_values: bool = False,
    **flags: Any,
) -> Case:
    """Return a case.

    `kinds`: of the blocks; `chosen`: experts of the tokens, spread (drawn for each), halved (half of them the same),
    same, or last (the last K); `is_strided`: rows of the page tables lie apart; `large_values`: SwiGLUs clamp.
    """
    return Case(
        name=name,
        sizes={**sizes, "S": len(lengths), "B": len(kinds)},
        formats={
            "activation": activation,
            "kv": activation,
            "projection": activation,
            "weight": weight,
        },
        phase="decode",
        rows=len(lengths),
        options={
            "lengths": tuple(lengths),
            "kinds": tuple(kinds),
            "window": window,
            "chosen": chosen,
            "is_strided": is_strided,
            "sink": sink,
            "large_values": large_values,
        },
        **flags,
    )


def _timed() -> list[Case]:
    return [
        make_case(
            f"{size}_{num}x{context}",
            [context] * num,
            sizes,
            kinds=ALTERNATING * (blocks // 2),
            large=True,
            timed=True,
        )
        for size, sizes, blocks in (("20b", GPT_OSS_20B, 24), ("120b", GPT_OSS_120B, 36))
        for num in range(1, MAX_SEQUENCES + 1)
        for context in (128, 8192)
    ]


def _gpt_oss() -> list[Case]:
    """Few blocks: every length at which a page, the window or a part of a split history may end."""
    pages_of_16 = {**GPT_OSS_20B, "L": 16}
    lengths = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130, 255, 257, 2500, 4096, 4097)
    one = [
        make_case(f"20b_of_{n}{word}", [n], sizes, large=True)
        for n in lengths
        for word, sizes in (("", GPT_OSS_20B), ("_pages_of_16", pages_of_16))
    ]
    pairs = ((1, 1), (1, 130), (128, 127), (129, 64), (65, 3000), (8192, 16), (20000, 511))
    two = [
        make_case(f"20b_of_{a}_and_{b}", [a, b], GPT_OSS_20B, chosen=chosen, large=True)
        for (a, b), chosen in zip(
            pairs, ("same", "halved", "spread", "last", "halved", "spread", "same"), strict=True
        )
    ]
    return [
        make_case("20b_layer", [70], GPT_OSS_20B, kinds=("window",), chosen="last", branches=True),
        *one,
        *two,
        make_case("20b_padding_last", [90, 0], GPT_OSS_20B, large=True),
        make_case("20b_padding_first", [0, 200], GPT_OSS_20B, chosen="halved", large=True),
        make_case("20b_only_padding", [0, 0], GPT_OSS_20B, large=True),
        make_case("20b_strided", [300, 77], GPT_OSS_20B, is_strided=True, large=True),
        make_case("20b_full_alone", [150], GPT_OSS_20B, kinds=("full",), large=True, branches=True),
        make_case("20b_windows_alone", [150, 9], GPT_OSS_20B, kinds=("window",) * 2, large=True),
        make_case(
            "20b_three", [200, 300], GPT_OSS_20B, kinds=("window", "full", "window"), large=True
        ),
        make_case("20b_clamped", [40, 41], GPT_OSS_20B, large_values=True, large=True),
        make_case("20b_sink_wins", [40, 300], GPT_OSS_20B, sink=8.0, large=True),
        make_case("20b_pages_of_256", [600, 255], {**GPT_OSS_20B, "L": 256}, large=True),
        make_case("120b_layer", [140], GPT_OSS_120B, kinds=("window",), large=True),
        make_case("120b_two", [140, 1000], GPT_OSS_120B, chosen="halved", large=True),
        make_case("120b_last_experts", [64], GPT_OSS_120B, chosen="last", large=True),
    ]


def _float32(
    name: str, lengths: Sequence[int], sizes: dict[str, int] = SMALL, **options: Any
) -> Case:
    return make_case(name, lengths, sizes, activation="float32", **options)


def _edges() -> list[Case]:
    return [
        *(_float32(f"of_{n}", [n], window=8) for n in (1, 7, 8, 9, 15, 16, 17, 33)),
        _float32("two", [40, 9], window=8, chosen="halved"),
        _float32("two_pages_of_4", [40, 9], {**SMALL, "L": 4}, window=8),
        _float32("same_experts", [5, 20], window=8, chosen="same"),
        _float32("last_experts", [5, 20], window=8, chosen="last"),
        _float32("padding_last", [12, 0], window=8),
        _float32("padding_first", [0, 30], window=8),
        _float32("only_padding", [0, 0]),
        _float32("strided", [50, 30], window=8, is_strided=True),
        _float32("full_alone", [30], kinds=("full",)),
        _float32("windows_alone", [30, 4], kinds=("window",) * 3, window=8),
        _float32("five_blocks", [30], kinds=(*ALTERNATING * 2, "window"), window=8),
        _float32("clamped", [30, 3], large_values=True),
        _float32("sink_wins", [30, 3], sink=8.0),
        _float32("one_kv_head", [30, 3], {**SMALL, "G": 1}),
        _float32("all_experts", [30, 3], {**SMALL, "E": 4, "K": 4}),
        _float32("float32_weights", [30, 3], weight="float32"),
        make_case("float64", [30, 3], window=8, activation="float64", weight="float64"),
        make_case("bf16", [30, 3], window=8),
        make_case("bf16_weights", [30, 3], window=8, weight="bf16"),
        *(
            make_case(f"model_of_{n}", [n], MODEL, window=32)
            for n in (1, 2, 16, 17, 32, 33, 64, 65, 70, 128, 130)
        ),
        make_case("model_window_of_1", [20], MODEL, window=1),
        make_case("model_padding", [0], MODEL, window=32),
        make_case("model_of_130_pages_of_64", [130], {**MODEL, "L": 64}, window=32),
        make_case("model_of_50_windows", [50], MODEL, kinds=("window",) * 2, window=32),
        make_case("model_three", [49], MODEL, kinds=("window", "full", "window"), window=32),
        make_case("model_of_30_clamped", [30], MODEL, large_values=True),
        make_case("model_of_30_sink_wins", [30], MODEL, sink=8.0),
        make_case("model_two", [200, 70], MODEL),
        make_case("model_same_experts", [31, 33], MODEL, window=32, chosen="same"),
        make_case("model_last_experts", [64, 65], MODEL, window=32, chosen="last"),
        make_case("model_halved", [129, 2], MODEL, chosen="halved"),
        make_case("model_padding_last", [40, 0], MODEL, window=32),
        make_case("model_padding_first", [0, 40], MODEL, window=32),
        make_case("model_only_padding", [0, 0], MODEL),
        make_case("model_strided", [90, 40], MODEL, window=32, is_strided=True),
        make_case("model_pages_of_64", [130, 63], {**MODEL, "L": 64}, window=32),
        make_case("model_full_alone", [50], MODEL, kinds=("full",)),
        make_case("model_windows_alone", [50, 9], MODEL, kinds=("window",) * 2, window=32),
        make_case("model_four", [50, 49], MODEL, kinds=ALTERNATING * 2, window=32),
        make_case("model_clamped", [30, 3], MODEL, large_values=True),
        make_case("model_sink_wins", [30, 3], MODEL, sink=8.0),
        make_case("model_64_experts", [33], {**MODEL, "E": 64}, chosen="last"),
        make_case("bf16_24_blocks", [60, 3], kinds=ALTERNATING * 12, window=8),
    ]


CASES = [*_timed(), *_gpt_oss(), *_edges()]


def inputs(case: Case, seed: int, device: str) -> dict[str, Any]:
    """Draw one call; scores as in attention_prefill, the new token's place in the pages holds junk."""
    source = generator(device, seed)
    s, options = case.sizes, case.options
    activation, lengths = case.formats["activation"], options["lengths"]
    num_quiet = ceil_div(s["D"] // 8, 16) * 16
    quiet_Q = torch.randperm(s["D"], generator=source, device=device)[:num_quiet]
    residual_SD = normal(s["S"], s["D"], source=source, dtype=activation)
    residual_SD[:, quiet_Q] = _signs(s["S"], num_quiet, source=source).to(residual_SD.dtype)
    blocks = tuple(
        _block(case, kind, residual_SD[:, quiet_Q].float(), quiet_Q, source=source)
        for kind in options["kinds"]
    )
    lengths_S = torch.tensor(lengths, dtype=torch.int32, device=device)
    positions_S = (lengths_S.long() - 1).clamp_min(0)
    pages: dict[str, Tensor] = {}
    tables: dict[str, Tensor] = {}
    for kind in ALTERNATING:
        pages[kind], tables[f"{kind}_table_SP"] = draw_pages(
            lengths,
            [max(0, n - 1) for n in lengths],
            page_tokens=s["L"],
            kv_heads=s["G"],
            head_dim=s["A"],
            window_tokens=options["window"] if kind == "window" else None,
            kv_format=case.formats["kv"],
            source=source,
        )
        page_S = tables[f"{kind}_table_SP"].long().gather(1, positions_S[:, None] // s["L"])[:, 0]
        slots_S = page_S * s["L"] + positions_S % s["L"]
        tables[f"{kind}_slots_S"] = slots_S.masked_fill(lengths_S == 0, -1)
        for n, page in zip(lengths, page_S.tolist(), strict=True):
            if n:
                pages[kind][page, :, :, (n - 1) % s["L"]] = JUNK
    if options["is_strided"]:
        for name in ("full_table_SP", "window_table_SP"):
            wider = torch.cat([tables[name], torch.full_like(tables[name][:, :3], 7)], dim=1)
            tables[name] = wider[:, : tables[name].shape[1]]
    return {
        "residual_SD": residual_SD,
        "positions_S": positions_S,
        "lengths_S": lengths_S,
        "cos_sin_NA": _angles(max(lengths) + 1, s["A"], activation, device),
        **tables,
        "kv_pages": [_like(pages[kind], case, source=source) for kind in options["kinds"]],
        "weights": StackWeights(blocks=blocks),
        "experts_per_token": s["K"],
        "eps": 1e-5,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }


def _signs(*shape: int, source: torch.Generator) -> Tensor:
    """Draw -1 and 1."""
    return torch.randint(2, shape, generator=source, device=source.device) * 2.0 - 1.0


def _angles(num_positions: int, head_dim: int, activation: str, device: str) -> Tensor:
    pair_C = torch.arange(head_dim // 2, device=device).double()
    position_N = torch.arange(num_positions, device=device).double()
    angles_NC = torch.outer(position_N, 150000.0 ** (-pair_C / len(pair_C)))
    table_NA = 1.3465735902799727 * torch.cat([angles_NC.cos(), angles_NC.sin()], dim=1)
    return table_NA if activation == "float64" else table_NA.float()


def _like(pages: Tensor, case: Case, *, source: torch.Generator) -> Tensor:
    """Draw other keys and values, with junk at the same places."""
    drawn = draw_kv(*pages.shape, kv_format=case.formats["kv"], source=source)
    return torch.where(pages == JUNK, pages, drawn)


def _block(
    case: Case, kind: str, signs_SQ: Tensor, quiet_Q: Tensor, *, source: torch.Generator
) -> BlockWeights:
    s, formats = case.sizes, case.formats
    hidden, width, num_experts = s["D"], s["H"] * s["A"], s["E"]
    wide = "float64" if formats["activation"] == "float64" else "float32"
    gain = 6.0 if case.options["large_values"] else 1.5
    share = _SHARE_TIMED if case.timed else 1.0
    bias = formats["activation"]

    def linear(num_out: int, num_in: int, gain: float = 1.0) -> LinearWeights:
        return LinearWeights(
            matrix=matrix(formats["projection"], num_out, num_in, source=source, gain=gain),
            bias_N=normal(num_out, source=source, dtype=bias, scale=0.3 * gain),
        )

    qkv, out = linear((s["H"] + 2 * s["G"]) * s["A"], hidden), linear(hidden, width, gain=share)
    # Scores of a few units, so that some keys count and the output is no average of all of them.
    qkv.matrix.values[:width] *= 2
    experts = ExpertWeights(
        gate_up=matrix(
            formats["weight"], num_experts, 2 * s["I"], hidden, source=source, gain=gain
        ),
        gate_up_bias_EF=normal(num_experts, 2 * s["I"], source=source, dtype=bias, scale=0.3),
        down=matrix(formats["weight"], num_experts, hidden, s["I"], source=source, gain=share),
        down_bias_ED=normal(num_experts, hidden, source=source, dtype=bias, scale=0.3 * share),
    )
    assert out.bias_N is not None
    out.matrix.values[quiet_Q] = 0
    out.bias_N[quiet_Q] = 0
    experts.down.values[:, quiet_Q] = 0  # mxfp4: code 0 is the number 0
    experts.down_bias_ED[:, quiet_Q] = 0
    return BlockWeights(
        attention_norm_D=1 + normal(hidden, source=source, dtype=wide, scale=0.1),
        qkv=qkv,
        sinks_H=normal(s["H"], source=source, dtype=wide) + case.options["sink"],
        out=out,
        expert_norm_D=1 + normal(hidden, source=source, dtype=wide, scale=0.1),
        router=_router(case, signs_SQ, quiet_Q, source=source),
        experts=experts,
        window_tokens=case.options["window"] if kind == "window" else None,
    )


def _router(
    case: Case, signs_SQ: Tensor, quiet_Q: Tensor, *, source: torch.Generator
) -> LinearWeights:
    """Aim at logits: `above` and more for the chosen, `_STEP` apart; about 0 and a little for the others."""
    s, dtype = case.sizes, case.formats["activation"]
    num_rows = len(signs_SQ)
    ids_SK = _chosen(case, source=source).long()
    aimed_SE = normal(num_rows, s["E"], source=source, scale=0.2)
    steps_K = torch.arange(s["K"], 0, -1, device=source.device) - 1
    above = _ABOVE_TIMED if case.timed else _ABOVE
    aimed_SE.scatter_(1, ids_SK, (above + _STEP * steps_K).expand(num_rows, -1).contiguous())
    matrix_ED = normal(s["E"], s["D"], source=source, scale=0.1 / s["D"] ** 0.5)
    # The least matrix whose product with the quiet columns of every token is what was aimed at.
    matrix_ED[:, quiet_Q] = (torch.linalg.pinv(signs_SQ) @ aimed_SE).T
    bias_E = normal(s["E"], source=source, dtype=dtype, scale=0.2)
    return LinearWeights(matrix=plain(matrix_ED.to(torch_dtype(dtype))), bias_N=bias_E)


def _chosen(case: Case, *, source: torch.Generator) -> Tensor:
    s, chosen = case.sizes, case.options["chosen"]
    ids_SK = routing(s["S"], s["E"], s["K"], source=source)
    if chosen == "same":
        return ids_SK[:1].expand(s["S"], -1)
    if chosen == "last":
        last_K = torch.arange(s["E"] - s["K"], s["E"], dtype=torch.int32, device=source.device)
        return last_K.expand(s["S"], -1)
    if chosen == "halved":
        half = s["K"] // 2
        others_SE = torch.rand(s["S"], s["E"], generator=source, device=source.device)
        others_SE.scatter_(1, ids_SK[:1, :half].expand(s["S"], -1).long(), 2.0)
        return others_SE.topk(s["K"], dim=-1).indices.int()
    return ids_SK


def promised(case: Case, name: str, tensor: Any) -> Tensor:
    """All pages as one tensor, zeros for junk: it is as large as no key, and would hide what a key is off."""
    if name != "kv_pages":
        return tensor
    numbers = torch.cat([pages.flatten() for pages in tensor])
    return numbers.masked_fill(numbers == JUNK, 0)


def tolerance(case: Case) -> Tolerance:
    """Ids are the same in every right implementation; a flipped last bit of one part is an input of all after it."""
    if case.formats["activation"] != "bf16":
        return Tolerance(
            relative=3e-6,
            absolute=1e-5,
            reason="float32 sums in another order, through two to five blocks",
        )
    if case.sizes["B"] <= FEW_BLOCKS:
        return Tolerance(
            relative=1.5e-2,
            absolute=2.5e-2,
            reason="some ten roundings to bf16 a block, 2^-9 each at most, some of them on the other side; a float32 "
            "composition that rounds the SwiGLU and each expert's output too is 5e-3 off after two blocks, 9.5e-3 "
            "after four; a page of forty left out would be 4e-2",
        )
    return Tolerance(
        relative=5e-2,
        absolute=6e-2,
        reason="the same through 24 to 36 blocks: what one is off passes through all after it; 2.7e-2 seen",
    )


def flops(case: Case) -> int:
    """Two operations per weight and row, four per visible key, query head and column."""
    s = case.sizes
    width = s["H"] * s["A"]
    weights = (
        2 * (width + s["G"] * s["A"]) * s["D"] + s["E"] * s["D"] + 3 * s["K"] * s["D"] * s["I"]
    )
    return 2 * s["S"] * s["B"] * weights + 4 * width * sum(_keys(case))


def num_bytes(case: Case) -> int:
    """Projections once, the experts that are hit once, visible keys and values, rows in and out."""
    s, formats = case.sizes, case.formats
    width, qkv = s["H"] * s["A"], (s["H"] + 2 * s["G"]) * s["A"]
    element = BITS_PER_ELEMENT[formats["activation"]] // 8
    projection, kind = FORMATS[formats["projection"]], FORMATS[formats["weight"]]
    linear = projection.num_bytes(qkv, s["D"]) + projection.num_bytes(s["D"], width)
    linear += element * (s["E"] * (s["D"] + 1) + qkv + s["D"])
    expert = kind.num_bytes(2 * s["I"], s["D"]) + kind.num_bytes(s["D"], s["I"])
    expert += element * (2 * s["I"] + s["D"])
    block = linear + _num_hit(case) * expert + 4 * (2 * s["D"] + s["H"])
    kv = 2 * element * s["G"] * s["A"] * sum(_keys(case))
    return int(s["B"] * block + kv + 2 * element * s["S"] * s["D"])


def _num_hit(case: Case) -> float:
    s = case.sizes
    if case.options["chosen"] in ("same", "last"):
        return s["K"]
    if case.options["chosen"] == "halved":
        half = s["K"] // 2
        return half + expected_experts(s["S"], s["E"] - half, s["K"] - half)
    return expected_experts(s["S"], s["E"], s["K"])


def _keys(case: Case) -> list[int]:
    """Return how many each block sees, over all sequences."""
    window, lengths = case.options["window"], case.options["lengths"]
    seen = {"full": sum(lengths), "window": sum(min(n, window) for n in lengths)}
    return [seen[kind] for kind in case.options["kinds"]]
