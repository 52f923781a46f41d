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

from rose.kernels import dependent
from rose.kernels.moe_experts import gluon_decode_device as device
from rose.kernels.moe_experts.triton_decode_device import combine_kernel, sort_pairs_kernel
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import ExpertWeights
from rose.utils.math import ceil_div, is_power_of_two, next_power_of_two

BY_PAIR, BY_LEADER, BY_EXPERT, SORTED = (
    mode.value for mode in (device.BY_PAIR, device.BY_LEADER, device.BY_EXPERT, device.SORTED)
)
MAX_TOKENS = 512
SPILLS = {
    "down_kernel": (
        8,
        "two registers of 254 at 32 tokens a pass; not yet timed against smaller tiles",
    )
}
"""For `python -m rose.kernels aot`: bytes and reason."""
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
    work = list_work(shape, expert_ids_TK, weights.down.shape[0])
    act_PI = x_TD.new_empty(work.num_pairs, weights.down.shape[2])
    gate_up(work, x_TD, weights, act_PI, alpha=swiglu_alpha, limit=swiglu_limit)
    if shape.is_fused:
        down_and_sum(work, act_PI, expert_weights_TK, weights, out_TD)
        return
    y_PD = x_TD.new_empty(work.num_pairs, x_TD.shape[1], dtype=torch.float32)
    down(work, act_PI, weights, y_PD)
    add_up(work, y_PD, expert_weights_TK, out_TD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How the pairs of one call are shared out."""

    shape: Launch
    ids_TK: Tensor
    order_P: Tensor
    """Pairs by expert, if sorted."""
    starts_E1: Tensor

    @property
    def num_pairs(self) -> int:
        """Tokens times choices."""
        return self.ids_TK.numel()

    @property
    def options(self) -> dict[str, Any]:
        """Launch options of every kernel."""
        return dependent.options(self.shape.is_dependent)

    def slots(self, num_experts: int) -> int:
        """Programs along the second axis of the grid."""
        return self.num_pairs if self.shape.mode in (BY_PAIR, BY_LEADER) else num_experts

    def constants(self) -> dict[str, Any]:
        """Constants of both matrix kernels."""
        # LIMIT: a program unrolls its scan of the ids; SORTED has no such bound.
        is_scanned = self.shape.mode in (BY_LEADER, BY_EXPERT)
        return {
            "MODE": self.shape.mode,
            "PAIRS": next_power_of_two(self.num_pairs) if is_scanned else 1,
            "TOKENS": self.shape.tokens,
            "PDL": self.shape.is_dependent,
        }


def list_work(shape: Launch, ids_TK: Tensor, num_experts: int) -> Work:
    """List the pairs of each expert, where the launch shape asks for it."""
    if shape.mode != SORTED:
        return Work(shape=shape, ids_TK=ids_TK, order_P=ids_TK, starts_E1=ids_TK)
    order_P = ids_TK.new_empty(ids_TK.numel())
    starts_E1 = ids_TK.new_empty(num_experts + 1)
    work = Work(shape=shape, ids_TK=ids_TK, order_P=order_P, starts_E1=starts_E1)
    sort_pairs_kernel[(num_experts,)](
        ids_TK, order_P, starts_E1, work.num_pairs,
        EXPERTS=num_experts, PAIRS=next_power_of_two(work.num_pairs), PDL=shape.is_dependent,
        **work.options,
    )  # fmt: skip
    return work


def gate_up(
    work: Work, x_TD: Tensor, weights: ExpertWeights, act_PI: Tensor, *, alpha: float, limit: float
) -> None:
    """Write the SwiGLU of every pair."""
    tile = work.shape.up
    num_experts, hidden, inner = weights.down.shape
    device.gate_up_kernel[(inner // (16 * tile.warps_m), work.slots(num_experts))](
        x_TD, work.ids_TK, work.order_P, work.starts_E1,
        _ints(weights.gate_up.values), weights.gate_up.scales, weights.gate_up_bias_EF,
        act_PI, work.num_pairs, alpha, limit,
        K=work.ids_TK.shape[1], INNER=inner, COLUMNS=hidden, SPLITS=tile.splits,
        WARPS_M=tile.warps_m, STAGES=tile.stages, num_warps=tile.splits * tile.warps_m,
        maxnreg=tile.max_registers, **work.constants(), **work.options,
    )  # fmt: skip


def down(work: Work, act_PI: Tensor, weights: ExpertWeights, y_PD: Tensor) -> None:
    """Write the expert's output of every pair, not yet weighted."""
    tile = work.shape.down
    num_experts, hidden, inner = weights.down.shape
    rows = tile.warps_m * tile.rows_per_warp
    device.down_kernel[(hidden // rows, work.slots(num_experts))](
        act_PI, work.ids_TK, work.order_P, work.starts_E1,
        _ints(weights.down.values), weights.down.scales, weights.down_bias_ED, y_PD, work.num_pairs,
        OUT=hidden, COLUMNS=inner, SPLITS=tile.splits, WARPS_M=tile.warps_m, ROWS=rows,
        STAGES=tile.stages, num_warps=tile.splits * tile.warps_m, maxnreg=tile.max_registers,
        **work.constants(), **work.options,
    )  # fmt: skip


def down_and_sum(
    work: Work, act_PI: Tensor, weights_TK: Tensor, weights: ExpertWeights, out_TD: Tensor
) -> None:
    """Write the weighted sum over the experts of each token, straight from the SwiGLU."""
    tile = work.shape.down
    _, hidden, inner = weights.down.shape
    num_tokens, chosen = work.ids_TK.shape
    device.down_combine_kernel[(hidden // 16, num_tokens)](
        act_PI, work.ids_TK, weights_TK,
        _ints(weights.down.values), weights.down.scales, weights.down_bias_ED, out_TD,
        K=chosen, OUT=hidden, COLUMNS=inner, SPLITS=tile.splits, STAGES=tile.stages,
        PDL=work.shape.is_dependent, num_warps=chosen * tile.splits, maxnreg=tile.max_registers,
        **work.options,
    )  # fmt: skip


def add_up(work: Work, y_PD: Tensor, weights_TK: Tensor, out_TD: Tensor) -> None:
    """Add up the experts of each token, weighted, the first choice first."""
    num_tokens, hidden = out_TD.shape
    combine_kernel[(ceil_div(hidden, _COMBINE_BLOCK), num_tokens)](
        y_PD, work.ids_TK, weights_TK, out_TD,
        K=work.ids_TK.shape[1], OUT=hidden, BLOCK=_COMBINE_BLOCK, PDL=work.shape.is_dependent,
        **work.options,
    )  # fmt: skip


def _ints(values: Tensor) -> Tensor:
    """View packed codes [..., K / 32, 16] as ints; rows are 16 bytes aligned."""
    return values.view(torch.int32)


FEW_EXPERTS = 64
"""Measured on an H200 at 128 tokens: 325 us against 332 with 32 experts, 673 against 639 with 128."""


def _limits(sizes: Sizes) -> str | None:
    hidden, inner, experts = sizes["D"], sizes["I"], sizes["E"]
    if hidden % 32 or inner % 32:
        return f"D {hidden} and I {inner} must be multiples of 32"
    if experts * max(2 * inner * hidden, hidden * inner) // 8 >= 1 << 31:
        return f"{experts} experts of {inner} x {hidden} pass 32-bit offsets"
    if experts > FEW_EXPERTS:
        return f"{experts} experts; from {FEW_EXPERTS} on a CUDA kernel is faster at every batch"
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
