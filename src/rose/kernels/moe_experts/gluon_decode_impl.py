"""Experts of small batches: mxfp4 weights streamed from memory once, activations in bf16.

At most three launches after the router's, and none of them sorts below 17 tokens: gate_up with SwiGLU,
down, and the ordered sum over the chosen experts. For one or two tokens down and sum are one kernel. The
checkpoint's layout is read as it is, so prefill and decode share one copy of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rose.kernels.moe_experts import gluon_decode_device as device
from rose.kernels.moe_experts.triton_decode_device import combine_kernel, sort_pairs_kernel
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import ExpertWeights
from rose.utils.math import ceil_div, is_power_of_two, next_power_of_two

BY_PAIR, BY_LEADER, BY_EXPERT, SORTED = (
    mode.value for mode in (device.BY_PAIR, device.BY_LEADER, device.BY_EXPERT, device.SORTED)
)
MAX_TOKENS = 512
_COMBINE_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Launch shape of one matrix kernel."""

    splits: int
    """Parts of the columns, one warp (or row of warps) each."""
    warps_m: int = 1
    rows_per_warp: int = 32
    """Weight rows; of gate_up always 32: 16 gate and 16 up."""
    stages: int = 2
    """Steps of weights in flight per warp."""
    max_registers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Launch shape of one call."""

    mode: int
    tokens: int = 8
    """Tokens of an expert that one pass over its weights serves."""
    up: Tile
    down: Tile
    is_fused: bool = False
    """Down and sum in one kernel (one program works for all experts of a token)."""
    is_dependent: bool = False
    """Programmatic dependent launch: a kernel may start while the one before drains."""


def choose(num_tokens: int, sizes: Sizes) -> Launch:
    """Return the launch shape; guesses from the tile arithmetic, to be replaced by measurements."""
    num_pairs = num_tokens * sizes["K"]
    can_fuse = is_power_of_two(sizes["K"])
    if num_tokens <= 2 and can_fuse:
        return Launch(mode=BY_PAIR, up=Tile(splits=4), down=Tile(splits=2, stages=4), is_fused=True)
    if num_tokens <= 16:
        mode = BY_EXPERT if num_pairs >= sizes["E"] else BY_LEADER
        return Launch(mode=mode, up=Tile(splits=4), down=Tile(splits=4))
    rows_per_expert = num_pairs / sizes["E"]
    tokens = 8 if rows_per_expert <= 4 else 16 if rows_per_expert <= 10 else 32
    warps = 2 if sizes["I"] % 32 == 0 else 1
    return Launch(mode=SORTED, tokens=tokens, up=Tile(splits=2, warps_m=warps), down=Tile(splits=2))


def moe_experts(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: ExpertWeights,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
) -> None:
    """See the contract."""
    num_tokens, hidden = x_TD.shape
    if num_tokens == 0:
        return
    num_experts, _, inner = weights.down.shape
    sizes = {"D": hidden, "I": inner, "E": num_experts, "K": expert_ids_TK.shape[1]}
    launch(
        choose(num_tokens, sizes), x_TD, expert_ids_TK, expert_weights_TK, weights=weights,
        swiglu_alpha=swiglu_alpha, swiglu_limit=swiglu_limit, out_TD=out_TD,
    )  # fmt: skip


def launch(
    shape: Launch,
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    expert_weights_TK: Tensor,
    *,
    weights: ExpertWeights,
    swiglu_alpha: float,
    swiglu_limit: float,
    out_TD: Tensor,
) -> None:
    """Run with a given launch shape; `choose` has the ones in use."""
    num_tokens, hidden = x_TD.shape
    num_experts, _, inner = weights.down.shape
    chosen = expert_ids_TK.shape[1]
    num_pairs = num_tokens * chosen
    empty = x_TD.new_empty
    common: dict[str, Any] = {"launch_pdl": True} if shape.is_dependent else {}
    order, starts = expert_ids_TK, expert_ids_TK
    if shape.mode == SORTED:
        order = empty(num_pairs, dtype=torch.int32)
        starts = empty(num_experts + 1, dtype=torch.int32)
        sort_pairs_kernel[(num_experts,)](
            expert_ids_TK, order, starts, num_pairs,
            EXPERTS=num_experts, PAIRS=next_power_of_two(num_pairs), PDL=shape.is_dependent, **common,
        )  # fmt: skip
    is_by_pair = shape.mode in (BY_PAIR, BY_LEADER)
    slots = num_pairs if is_by_pair else num_experts
    # LIMIT: ids are scanned in up to 64 pairs; SORTED has no such bound.
    pairs = next_power_of_two(num_pairs) if shape.mode in (BY_LEADER, BY_EXPERT) else 1
    act_PI = empty(num_pairs, inner)
    up, down = shape.up, shape.down
    device.gate_up_kernel[(inner // (16 * up.warps_m), slots)](
        x_TD, expert_ids_TK, order, starts,
        _ints(weights.gate_up.values), weights.gate_up.scales, weights.gate_up_bias_EF,
        act_PI, num_pairs, swiglu_alpha, swiglu_limit,
        K=chosen, INNER=inner, COLUMNS=hidden, MODE=shape.mode, PAIRS=pairs, TOKENS=shape.tokens,
        SPLITS=up.splits, WARPS_M=up.warps_m, STAGES=up.stages, PDL=shape.is_dependent,
        num_warps=up.splits * up.warps_m, maxnreg=up.max_registers, **common,
    )  # fmt: skip
    if shape.is_fused:
        device.down_combine_kernel[(hidden // 16, num_tokens)](
            act_PI, expert_ids_TK, expert_weights_TK,
            _ints(weights.down.values), weights.down.scales, weights.down_bias_ED, out_TD,
            K=chosen, OUT=hidden, COLUMNS=inner, SPLITS=down.splits, STAGES=down.stages,
            PDL=shape.is_dependent, num_warps=chosen * down.splits, maxnreg=down.max_registers,
            **common,
        )  # fmt: skip
        return
    y_PD = empty(num_pairs, hidden, dtype=torch.float32)
    rows = down.warps_m * down.rows_per_warp
    device.down_kernel[(hidden // rows, slots)](
        act_PI, expert_ids_TK, order, starts,
        _ints(weights.down.values), weights.down.scales, weights.down_bias_ED, y_PD, num_pairs,
        OUT=hidden, COLUMNS=inner, MODE=shape.mode, PAIRS=pairs, TOKENS=shape.tokens,
        SPLITS=down.splits, WARPS_M=down.warps_m, ROWS=rows, STAGES=down.stages,
        PDL=shape.is_dependent, num_warps=down.splits * down.warps_m, maxnreg=down.max_registers,
        **common,
    )  # fmt: skip
    combine_kernel[(ceil_div(hidden, _COMBINE_BLOCK), num_tokens)](
        y_PD, expert_ids_TK, expert_weights_TK, out_TD,
        K=chosen, OUT=hidden, BLOCK=_COMBINE_BLOCK, PDL=shape.is_dependent, **common,
    )  # fmt: skip


def _ints(values: Tensor) -> Tensor:
    """View packed codes [..., K / 32, 16] as ints; rows are 16 bytes aligned."""
    return values.view(torch.int32)


def _limits(sizes: Sizes) -> str | None:
    hidden, inner, experts = sizes["D"], sizes["I"], sizes["E"]
    if hidden % 32 or inner % 32:
        return f"D {hidden} and I {inner} must be multiples of 32"
    if experts * max(2 * inner * hidden, hidden * inner) // 8 >= 1 << 31:
        return f"{experts} experts of {inner} x {hidden} pass 32-bit offsets"
    return None


register(
    Implementation(
        operation="moe_experts",
        name="gluon_decode",
        function=moe_experts,
        band=Band.SPECIALISED,
        device="cuda",
        min_capability=(9, 0),
        max_capability=(9, 0),
        formats={"activation": frozenset({"bf16"}), "weight": frozenset({"mxfp4"})},
        phases=frozenset({"decode"}),
        rows=(1, MAX_TOKENS),
        limits=_limits,
        note="weights streamed once, dequantised in registers",
    )
)
