"""Cases of moe_experts: 20b and 120b layers first, then odd rows, empty experts and foreign ids."""

from __future__ import annotations

from typing import Any

import torch

from rose.kernels.cases import FLOAT32, Case, Tolerance
from rose.kernels.draw import expected_experts, generator, matrix, normal, routing
from rose.kernels.formats import FORMATS
from rose.kernels.weights import ExpertWeights
from rose.utils.dtypes import BITS_PER_ELEMENT, torch_dtype

GPT_OSS_20B = {"D": 2880, "I": 2880, "E": 32, "K": 4}
GPT_OSS_120B = {"D": 2880, "I": 2880, "E": 128, "K": 4}
SMALL = {"D": 64, "I": 96, "E": 8, "K": 2}
SMALL_RAGGED = {"D": 192, "I": 192, "E": 4, "K": 2}
"""192 = 128 + 64, as 2880 = 22 * 128 + 64: the last block of fp8 scales is short."""
ROWS_OF_SLABS = (1, 64, 65, 128, 129, 200)
"""Tiles of E4M3 weights have one slab of 64 rows or two; from 129 rows on there are two tiles."""
ROWS_OF_WIDTHS = (29, 61, 77, 93, 109, 125, 141, 157, 173, 189, 205, 221, 237, 253, 300)
"""Of every width of products that cuda_wide and cuda_swapped have, three or more rows short; 300 are two tiles."""
RAGGED_BOTH = {"D": 320, "I": 192, "E": 8, "K": 2}
"""320 = 2 * 128 + 64: the first product has a half block after whole ones, the second after one."""


def make_case(
    name: str,
    tokens: int,
    sizes: dict[str, int],
    *,
    activation: str = "bf16",
    weight: str = "mxfp4",
    experts_hit: int | None = None,
    foreign: bool = False,
    large_values: bool = False,
    constants: tuple[float, float] = (1.702, 7.0),
    weight_sum: float = 1.0,
    rows_of_experts: tuple[int, ...] = (),
    **flags: Any,
) -> Case:
    """Return a case.

    `experts_hit`: only so many experts are chosen; `foreign`: half of the ids are -1; `constants`: alpha and limit
    of the SwiGLU; `weight_sum`: what the weights of a token add up to; `rows_of_experts`: so many tokens have the
    first expert, the second, ..., in a drawn order, where each has one expert.
    """
    return Case(
        name=name,
        sizes={**sizes, "T": tokens},
        formats={"activation": activation, "weight": weight},
        phase=flags.pop("phase", "decode" if tokens <= 256 else "prefill"),
        rows=tokens,
        options={
            "experts_hit": experts_hit,
            "foreign": foreign,
            "large_values": large_values,
            "constants": constants,
            "weight_sum": weight_sum,
            "rows_of_experts": rows_of_experts,
        },
        **flags,
    )


def _timed(size: str, sizes: dict[str, int]) -> list[Case]:
    return [
        make_case(f"{size}_{weight}_{tokens}", tokens, sizes, weight=weight, large=True, timed=True)
        for weight in ("mxfp4", "fp8_block")
        for tokens in (1, 8, 32, 128, 8192, 32768)
    ] + [
        make_case(f"{size}_bf16_{tokens}", tokens, sizes, weight="bf16", large=True, timed=True)
        for tokens in (1, 128, 8192)
    ]


def _edges() -> list[Case]:
    rows = (1, 2, 63, 64, 65, 127, 128, 129, 300)
    cases = [make_case(f"rows_{t}", t, SMALL, activation="float32") for t in rows]
    cases += [make_case(f"bf16_rows_{t}", t, SMALL) for t in (1, 17, 129)]
    for weight in ("float32", "bf16", "mxfp4", "fp8_block"):
        cases.append(
            make_case(f"{weight}_weights", 33, SMALL_RAGGED, activation="float32", weight=weight)
        )
        if weight != "float32":
            cases.append(make_case(f"bf16_by_{weight}", 33, SMALL_RAGGED, weight=weight))
    cases += [
        make_case("one_expert_takes_all", 70, SMALL, activation="float32", experts_hit=2),
        make_case(
            "most_experts_empty", 130, {**SMALL, "E": 32}, activation="float32", experts_hit=3
        ),
        make_case("foreign_ids", 50, SMALL, activation="float32", foreign=True),
        make_case("foreign_ids_bf16", 300, SMALL, foreign=True),
        make_case("clamped", 20, SMALL, activation="float32", large_values=True),
        make_case("one_choice", 9, {**SMALL, "K": 1}, activation="float32"),
        make_case("all_experts", 9, {**SMALL, "E": 4, "K": 4}, activation="float32"),
        make_case("float64", 9, SMALL, activation="float64", weight="float64"),
        make_case("20b_width", 3, {**GPT_OSS_20B, "E": 2, "K": 1}),
        make_case("20b_width_rows_65", 65, {**GPT_OSS_20B, "E": 2, "K": 1}),
        make_case("20b_prefill_fp8", 2000, GPT_OSS_20B, weight="fp8_block", large=True),
        # Past 160 tokens of 128 experts cuda_e4m3 has another launch shape.
        make_case("120b_rows_250", 250, GPT_OSS_120B, large=True),
        make_case("120b_prefill_foreign", 3000, GPT_OSS_120B, foreign=True, large=True),
        *(
            make_case(f"fp8_prefill_rows_{t}", t, SMALL_RAGGED, weight="fp8_block", phase="prefill")
            for t in (1, 65, 129)
        ),
        make_case(
            "fp8_prefill_empty_experts",
            70,
            {**SMALL_RAGGED, "E": 16},
            weight="fp8_block",
            experts_hit=3,
            phase="prefill",
        ),
        make_case(
            "fp8_prefill_foreign",
            40,
            SMALL_RAGGED,
            weight="fp8_block",
            foreign=True,
            phase="prefill",
        ),
        *(
            make_case(f"mxfp4_prefill_rows_{t}", t, RAGGED_BOTH, phase="prefill", branches=t == 65)
            for t in (1, 65, 300)
        ),
        # More experts than an fp8 copy is kept of, and two or three tiles for each that is hit.
        make_case(
            "mxfp4_prefill_many_experts",
            800,
            {**RAGGED_BOTH, "D": 192, "I": 320, "E": 72},
            experts_hit=3,
            foreign=True,
            phase="prefill",
        ),
        # Steps so long that tiles of 256 tokens are bound: spread over all experts, and on three of them.
        *(
            make_case(
                f"mxfp4_prefill_long_{name}",
                tokens,
                {**RAGGED_BOTH, "D": 192, "I": 320, "E": 72},
                experts_hit=hit,
                foreign=hit is not None,
            )
            for name, tokens, hit in (("spread", 2049, None), ("empty_experts", 2200, 3))
        ),
        make_case(
            "mxfp4_prefill_long_constants",
            2049,
            {**RAGGED_BOTH, "D": 192, "I": 320, "E": 72},
            constants=(1.25, 2.0),
            weight_sum=0.6,
        ),
        # 576 = 4 * 128 + 64: an even number of whole blocks behind the half one, as 2880 has.
        make_case(
            "mxfp4_prefill_long_widths",
            sum(ROWS_OF_WIDTHS),
            {"D": 576, "I": 192, "E": 72, "K": 1},
            rows_of_experts=ROWS_OF_WIDTHS,
            branches=True,
        ),
        make_case(
            "fp8_prefill_slabs",
            sum(ROWS_OF_SLABS),
            {**SMALL_RAGGED, "E": 8, "K": 1},
            weight="fp8_block",
            rows_of_experts=ROWS_OF_SLABS,
            branches=True,
        ),
        # What gpt-oss never has: finds constants that a kernel brings along, and weights normalised once more.
        make_case(
            "other_constants",
            20,
            SMALL,
            activation="float32",
            constants=(1.25, 2.0),
            weight_sum=0.6,
        ),
        make_case("other_constants_mxfp4", 20, SMALL, constants=(1.25, 2.0), weight_sum=0.6),
        *(
            make_case(
                f"other_constants_fp8_{phase}",
                65,
                SMALL_RAGGED,
                weight="fp8_block",
                constants=(1.25, 2.0),
                weight_sum=0.6,
                phase=phase,
            )
            for phase in ("decode", "prefill")
        ),
        make_case("20b_skewed", 4096, GPT_OSS_20B, experts_hit=5, large=True),
    ]
    return cases


CASES = [*_timed("20b", GPT_OSS_20B), *_timed("120b", GPT_OSS_120B), *_edges()]


def inputs(case: Case, seed: int, device: str) -> dict[str, Any]:
    """Draw one call: routing spread evenly unless the case says otherwise."""
    source = generator(device, seed)
    tokens, hidden, inner, experts, chosen = (case.sizes[n] for n in ("T", "D", "I", "E", "K"))
    activation, weight = case.formats["activation"], case.formats["weight"]
    dtype = torch_dtype(activation)
    bias = "bf16" if activation == "bf16" else activation
    ids_TK = routing(tokens, case.options["experts_hit"] or experts, chosen, source=source)
    if case.options["rows_of_experts"]:
        rows_E = torch.tensor(case.options["rows_of_experts"], device=device)
        ids_T = torch.arange(len(rows_E), device=device).repeat_interleave(rows_E).int()
        ids_TK = ids_T[torch.randperm(tokens, generator=source, device=device)].unsqueeze(1)
    if case.options["foreign"]:
        is_foreign_TK = torch.rand(ids_TK.shape, generator=source, device=device) < 0.5
        ids_TK = ids_TK.masked_fill(is_foreign_TK, -1)
    weights = ExpertWeights(
        gate_up=matrix(weight, experts, 2 * inner, hidden, source=source),
        gate_up_bias_EF=normal(experts, 2 * inner, source=source, dtype=bias, scale=0.3),
        down=matrix(weight, experts, hidden, inner, source=source),
        down_bias_ED=normal(experts, hidden, source=source, dtype=bias, scale=0.3),
    )
    size = 8.0 if case.options["large_values"] else 1.5
    logits_TK = normal(tokens, chosen, source=source)
    return {
        "x_TD": normal(tokens, hidden, source=source, dtype=activation, scale=size),
        "expert_ids_TK": ids_TK,
        "expert_weights_TK": (logits_TK.softmax(dim=-1) * case.options["weight_sum"]).to(dtype),
        "weights": weights,
        "swiglu_alpha": case.options["constants"][0],
        "swiglu_limit": case.options["constants"][1],
        "out_TD": torch.empty(tokens, hidden, dtype=dtype, device=device),
    }


def rotated(case: Case, arguments: dict[str, Any], step: int) -> dict[str, Any]:
    """Choose other experts, the same number of them: four of 128 would stay in the L2 cache from call to call."""
    ids_TK, chosen = arguments["expert_ids_TK"], case.sizes["K"]
    moved_TK = (ids_TK + step * chosen) % case.sizes["E"]
    return {**arguments, "expert_ids_TK": torch.where(ids_TK < 0, ids_TK, moved_TK)}


def tolerance(case: Case) -> Tolerance:
    """Roundings of an implementation that keeps activations in their own dtype."""
    if case.formats["activation"] != "bf16":
        return FLOAT32
    return Tolerance(
        relative=5e-3,
        absolute=1e-2,
        reason="three roundings to bf16, each 2^-9 at most: the SwiGLU before the second matrix, each "
        "expert's output, the result",
    )


def rounded_tolerance(case: Case, rounding: tuple[str, ...]) -> Tolerance:
    """Against the reference with the same rounding of activations."""
    return Tolerance(
        relative=2e-2,
        absolute=4e-2,
        reason="where the SwiGLU differs by 2^-9 (rounded to bf16 first; sums that stay in the tensor core cost half "
        "of that), about 5 % of its E4M3 values land one step (up to 2^-3) away: sqrt(0.05) * 0.08 = 1.8e-2; leaving "
        "out the rounding altogether would show as 3.7e-2",
    )


def flops(case: Case) -> int:
    """Two operations per weight of each chosen expert and token."""
    share = 0.5 if case.options["foreign"] else 1.0
    s = case.sizes
    return int(6 * s["T"] * s["K"] * s["D"] * s["I"] * share)


def num_bytes(case: Case) -> int:
    """The experts that are hit once (their expected number), the rows in and out."""
    s = case.sizes
    hit = expected_experts(s["T"], case.options["experts_hit"] or s["E"], s["K"])
    kind = FORMATS[case.formats["weight"]]
    expert = kind.num_bytes(2 * s["I"], s["D"]) + kind.num_bytes(s["D"], s["I"])
    element = BITS_PER_ELEMENT[case.formats["activation"]] // 8
    return int(hit * (expert + 2 * (2 * s["I"] + s["D"])) + 2 * s["T"] * s["D"] * element)
