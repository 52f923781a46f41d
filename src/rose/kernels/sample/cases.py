"""Cases of sample: gpt-oss vocabularies first, then each filter, ties, banned ids, wide seeds, damaged logits.

Tokens compare exactly. Another order of float32 operations moves a score by parts in a million, and the
best two of a row are closer than that about once in a million rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rose.kernels.cases import EXACT, Case, Tolerance
from rose.kernels.draw import generator, normal
from rose.utils.dtypes import BITS_PER_ELEMENT

GPT_OSS_VOCAB = 201088
GPT_OSS_IDS = 200019
"""Rows of the head from here on are no tokens."""


def make_case(
    name: str,
    rows: int,
    vocab: int,
    *,
    logits: str = "float32",
    filters: str = "none",
    temperature: float | None = 1.0,
    is_tied: bool = False,
    banned: str = "tail",
    is_damaged: bool = False,
    **flags: Any,
) -> Case:
    """Return a case.

    `filters`: none, top_k, top_p, min_p, mixed or borders; `temperature` None: a different one per row, some 0;
    `is_tied`: logits are small integers; `banned`: none, tail or all_but_one; `is_damaged`: most rows have logits
    that are not finite.
    """
    return Case(
        name=name,
        sizes={"V": vocab, "S": rows},
        formats={"logits": logits},
        phase="decode",
        rows=rows,
        options={
            "filters": filters,
            "temperature": temperature,
            "is_tied": is_tied,
            "banned": banned,
            "is_damaged": is_damaged,
        },
        **flags,
    )


_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "mixed": {"filters": "mixed", "temperature": None},
}

CASES = [
    *(
        make_case(f"gpt_oss_{kind}_{rows}", rows, GPT_OSS_VOCAB, large=True, timed=True, **options)
        for kind, options in _KINDS.items()
        for rows in (1, 8, 32, 128)
    ),
    *(make_case(f"rows_{rows}", rows, 300) for rows in (1, 63, 64, 65, 129)),
    *(make_case(f"vocab_{v}", 9, v, temperature=None) for v in (2, 50, 1023, 1024, 1025)),
    # A filtered row costs the interpreter seconds: few of them there, many on a GPU.
    *(make_case(f, 3, 500, filters=f) for f in ("top_k", "top_p", "min_p", "mixed")),
    *(
        make_case(f"{f}_many", 200, 5000, filters=f, large=True)
        for f in ("top_k", "top_p", "min_p", "mixed")
    ),
    make_case("greedy", 20, 1000, temperature=0.0),
    make_case("greedy_ties", 40, 64, temperature=0.0, is_tied=True),
    make_case("greedy_ignores_filters", 4, 64, temperature=0.0, filters="mixed"),
    make_case("temperatures", 64, 400, temperature=None),
    make_case("ties_filtered_many", 200, 40, is_tied=True, filters="mixed", large=True),
    make_case("ties_filtered", 6, 40, is_tied=True, filters="mixed"),
    make_case("filter_borders", 8, 8, filters="borders", banned="none"),
    make_case(
        "all_but_one_banned", 4, 100, banned="all_but_one", filters="mixed", temperature=None
    ),
    make_case("nothing_banned", 10, 100, banned="none"),
    make_case("damaged", 12, 500, temperature=None, is_damaged=True),
    make_case("damaged_filtered", 12, 500, filters="mixed", is_damaged=True),
    make_case("damaged_filtered_many", 240, 5000, filters="mixed", is_damaged=True, large=True),
    make_case("damaged_bf16", 6, 300, logits="bf16", temperature=None, is_damaged=True),
    make_case("bf16", 4, 600, logits="bf16", temperature=None, filters="mixed"),
    make_case("one_gpt_oss_row", 1, GPT_OSS_VOCAB, filters="mixed", temperature=None),
]


_BORDERS = (
    (2, 1.0, 0.0, 1.0),
    (3, 1.0, 0.0, 1.0),
    (0, 0.5, 0.0, 1.0),
    (0, 0.125, 0.0, 1.0),
    (2, 0.5, 0.0, 1.0),
    (4, 0.25, 0.0, 1.0),
    (0, 1.0, 1.0, 1.0),
    (0, 1.0, 0.5, 4.0),
)
"""top_k, top_p, min_p, temperature of rows whose eight logits are equal: every probability and every sum of them
is exact, so that the border itself is tried. The last one: all but the first are 1 lower, which min_p = 0.5
leaves out at temperature 1 and must keep at 4."""


def _borders(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace logits and filters by rows that lie on the border of a filter."""
    logits_SV = torch.zeros_like(arguments["logits_SV"])
    logits_SV[len(_BORDERS) - 1 :: len(_BORDERS), 1:] = -1.0
    changed = {"logits_SV": logits_SV}
    names = ("top_k_S", "top_p_S", "min_p_S", "temperature_S")
    for name, values in zip(names, zip(*_BORDERS, strict=True), strict=True):
        old = arguments[name]
        pattern = torch.tensor(values, dtype=old.dtype, device=old.device)
        changed[name] = pattern.repeat(len(old) // len(pattern))
    return {**arguments, **changed}


def _logits(case: Case, source: torch.Generator) -> Tensor:
    rows, vocab = case.sizes["S"], case.sizes["V"]
    logits_SV = normal(rows, vocab, source=source, dtype=case.formats["logits"], scale=2.0)
    if case.options["is_tied"]:
        logits_SV = logits_SV.round()
    if case.options["banned"] == "tail":
        logits_SV[:, max(1, vocab * GPT_OSS_IDS // GPT_OSS_VOCAB) :] = -torch.inf
    elif case.options["banned"] == "all_but_one":
        only_S1 = torch.randint(vocab, (rows, 1), generator=source, device=source.device)
        only = torch.full_like(logits_SV, -torch.inf)
        logits_SV = only.scatter_(1, only_S1, logits_SV.gather(1, only_S1))
    return _damaged(logits_SV) if case.options["is_damaged"] else logits_SV


def _damaged(logits_SV: Tensor) -> Tensor:
    """Put what no sound model gives into five of six rows; only NaN beside finite numbers leaves a token to choose."""
    logits_SV[0::6] = torch.nan
    logits_SV[1::6, ::3] = torch.nan
    logits_SV[2::6, 7] = torch.inf
    logits_SV[3::6] = -torch.inf
    logits_SV[4::6, 1:] = torch.nan
    logits_SV[4::12, 0] = -torch.inf
    return logits_SV


def _filters(kind: str, rows: int, source: torch.Generator) -> dict[str, Tensor]:
    """Return top_k, top_p and min_p; `mixed` gives each row any combination of the three."""
    device = source.device
    is_on_3S = torch.zeros(3, rows, dtype=torch.bool, device=device)
    if kind == "mixed":
        is_on_3S = torch.rand(3, rows, generator=source, device=device) < 0.5
    elif kind != "none":
        is_on_3S[("top_k", "top_p", "min_p").index(kind)] = True
    top_k_S = torch.randint(1, 50, (rows,), generator=source, device=device, dtype=torch.int32)
    top_p_S = torch.rand(rows, generator=source, device=device).clamp_min(0.05)
    min_p_S = torch.rand(rows, generator=source, device=device) * 0.5
    return {
        "top_k_S": top_k_S.masked_fill(~is_on_3S[0], 0),
        "top_p_S": top_p_S.masked_fill(~is_on_3S[1], 1.0),
        "min_p_S": min_p_S.masked_fill(~is_on_3S[2], 0.0),
    }


def inputs(case: Case, seed: int, device: str) -> dict[str, Any]:
    """Draw one call; seeds fill all 64 bits."""
    source = generator(device, seed)
    rows, temperature = case.sizes["S"], case.options["temperature"]
    logits_SV = _logits(case, source)
    if temperature is None:
        temperature_S = torch.rand(rows, generator=source, device=device) * 2 + 0.05
        temperature_S[::5] = 0.0
    else:
        temperature_S = torch.full((rows,), float(temperature), device=device)
    low, high = -(1 << 62), 1 << 62
    filters = case.options["filters"]
    arguments = {
        "logits_SV": logits_SV,
        "temperature_S": temperature_S,
        **_filters("none" if filters == "borders" else filters, rows, source),
        "seed_S": torch.randint(low, high, (rows,), generator=source, device=device) * 2,
        "position_S": torch.randint(131072, (rows,), generator=source, device=device),
        "is_filtered": filters != "none",
        "tokens_S": torch.empty(rows, dtype=torch.int64, device=device),
    }
    return _borders(arguments) if filters == "borders" else arguments


def tolerance(case: Case) -> Tolerance:
    """Tokens are equal or wrong."""
    return EXACT


def flops(case: Case) -> int:
    """About thirty integer and float operations per entry for hash and logarithms; none for greedy."""
    per_entry = 1 if case.options["temperature"] == 0.0 else 30
    return per_entry * case.sizes["S"] * case.sizes["V"]


def num_bytes(case: Case) -> int:
    """The logits once."""
    element = BITS_PER_ELEMENT[case.formats["logits"]] // 8
    return case.sizes["S"] * case.sizes["V"] * element
