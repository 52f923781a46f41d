"""All blocks of a model for one new token of each sequence: a fusion of everything between embedding and
final norm.

One call instead of a dozen a block, so that an implementation can fetch the next weights while it still computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rose.kernels.registry import FormatNames, Operation, Regime, Sizes
from rose.kernels.weights import StackWeights

MAX_SEQUENCES = 1
"""Of a step that is asked for: with two the parts are as fast (docs/experiments/decode_layers.md)."""


def decode_layers(
    residual_SD: Tensor,
    positions_S: Tensor,
    lengths_S: Tensor,
    cos_sin_NA: Tensor,
    *,
    full_table_SP: Tensor,
    full_slots_S: Tensor,
    window_table_SP: Tensor,
    window_slots_S: Tensor,
    kv_pages: list[Tensor],
    weights: StackWeights,
    experts_per_token: int,
    eps: float,
    swiglu_alpha: float,
    swiglu_limit: float,
) -> None:
    """Run every block on the newest token of each sequence, as its parts one after the other would.

    Shapes   S sequences, D hidden size, A head size, N positions, P page-table columns, L tokens per page, B blocks, of
             which each sees a window or everything
             residual_SD      activation dtype, contiguous; in: rows of the embedding
             positions_S      int64, 0-based
             lengths_S        int32: position + 1; 0: padding row of a graph, whose attention gives zeros
             cos_sin_NA       float32, as in rope_kv_write
             full_table_SP    int32, as in attention_decode, of the blocks that see everything; columns contiguous, row
                              stride may exceed P. window_table_SP: of the others
             full_slots_S     int64: page * L + offset of the new token in pages of full_table_SP; -1: not kept, allowed
                              in padding rows only. window_slots_S: in those of window_table_SP
             kv_pages         one of each block, [pages, 2, G, L, A], contiguous
             weights          see StackWeights; all windows are equally long. Blocks of one kind alone leave the table
                              and the slots of the other unread
    Units    eps of the norms; swiglu_alpha, swiglu_limit as in moe_experts
    Aliasing adds to residual_SD the output of both halves of every block, the last included; writes the new k and v
             into kv_pages
    Source   the references of the parts. Rounded to the activation dtype are: each norm's result, each projection,
             rotated q and k, the attention's output, routing weights, the experts' sum, and the residual stream after
             each addition
    """


def _validate(_formats: FormatNames, sizes: Sizes) -> list[str]:
    problems = []
    if sizes["A"] % 2:
        problems.append(f"head size {sizes['A']} is odd; rotary halves it")
    if sizes["H"] % sizes["G"]:
        problems.append(f"{sizes['H']} query heads are no multiple of {sizes['G']} kv heads")
    if not 1 <= sizes["K"] <= sizes["E"]:
        problems.append(f"{sizes['K']} experts per token of {sizes['E']}; allowed: 1..{sizes['E']}")
    return problems


def _check_call(
    residual_SD: Tensor, *, kv_pages: list[Tensor], weights: StackWeights, **arguments: Any
) -> list[str]:
    problems = [] if residual_SD.is_contiguous() else ["residual_SD is not contiguous"]
    if len(kv_pages) != len(weights.blocks):
        problems.append(f"{len(kv_pages)} layers of KV for {len(weights.blocks)} blocks")
    problems += [
        f"kv_pages[{i}] are not contiguous" for i, p in enumerate(kv_pages) if not p.is_contiguous()
    ]
    dtypes = {"positions_S": torch.int64, "lengths_S": torch.int32}
    for kind in ("full", "window"):
        dtypes |= {f"{kind}_table_SP": torch.int32, f"{kind}_slots_S": torch.int64}
        if arguments[f"{kind}_table_SP"].stride(-1) != 1:
            problems.append(f"columns of {kind}_table_SP are not contiguous")
    problems += [
        f"{name} is {arguments[name].dtype}, must be {dtype}"
        for name, dtype in dtypes.items()
        if arguments[name].dtype != dtype
    ]
    if len(weights.windows) > 1:
        problems.append(f"windows of {sorted(weights.windows)} tokens; all must be equally long")
    return problems


OPERATION = Operation(
    name="decode_layers",
    signature=decode_layers,
    sizes=("B", "D", "I", "H", "G", "A", "E", "K", "L", "R"),
    outputs=(),
    inouts=("residual_SD", "kv_pages"),
    formats=("activation", "kv", "projection", "weight"),
    validate=_validate,
    check_call=_check_call,
    regimes=(Regime("decode", 1, MAX_SEQUENCES),),
)
"""Sizes: R is the number of ranks that share the weights. Formats: `weight` is that of the experts, `projection` that
of the projections of attention."""
