"""The router in Triton: logits of a tile of tokens against all experts, then the best K, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import LinearWeights
from rose.utils.math import ceil_div, next_power_of_two


@triton.jit
def choose_best(
    logits, token, is_token, ids_ptr, weights_ptr,
    E: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write the best K of logits [tokens, EXPERTS] and the softmax over them; past E they are -inf.

    Equal logits: the lower id first. A row of NaN gives id E - 1, so that no later kernel leaves its arrays.
    """
    expert = tl.arange(0, EXPERTS)
    best = ()
    for k in tl.static_range(K):
        top = tl.max(logits, axis=1)
        chosen = tl.min(tl.where(logits == top[:, None], expert[None, :], E - 1), axis=1)
        tl.store(ids_ptr + token * K + k, chosen, mask=is_token)
        logits = tl.where(expert[None, :] == chosen[:, None], float("-inf"), logits)
        best = best + (top,)
    total = tl.exp(best[0] - best[0])
    for k in tl.static_range(1, K):
        total += tl.exp(best[k] - best[0])
    for k in tl.static_range(K):
        weight = tl.exp(best[k] - best[0]) / total
        tl.store(
            weights_ptr + token * K + k, weight.to(weights_ptr.dtype.element_ty), mask=is_token
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _kernel(
    x_ptr, w_ptr, bias_ptr, ids_ptr, weights_ptr, num_tokens,
    D: tl.constexpr, E: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, IS_FLOAT32: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, EXPERTS)
    column = tl.arange(0, BLOCK_D)
    is_token, is_expert = token < num_tokens, expert < E
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * D + column[None, :]
    w_ptrs = w_ptr + expert[:, None] * D + column[None, :]
    logits = tl.zeros([BLOCK_T, EXPERTS], tl.float32)
    for first in range(0, D, BLOCK_D):
        is_in = (column + first < D)[None, :]
        x = tl.load(x_ptrs + first, mask=is_token[:, None] & is_in, other=0.0)
        w = tl.load(w_ptrs + first, mask=is_expert[:, None] & is_in, other=0.0)
        if IS_FLOAT32:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        logits = tl.dot(x, w.T, logits, input_precision="ieee")
    if HAS_BIAS:
        logits += tl.load(bias_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)[None, :]
    logits = tl.where(is_expert[None, :], logits, float("-inf"))
    choose_best(logits, token.to(tl.int64), is_token, ids_ptr, weights_ptr, E, EXPERTS, K)


def moe_route(
    x_TD: Tensor, *, weights: LinearWeights, expert_ids_TK: Tensor, expert_weights_TK: Tensor
) -> None:
    """See the contract."""
    num_tokens, hidden = x_TD.shape
    if num_tokens == 0:
        return
    matrix_ED, bias_E = weights.matrix.values, weights.bias_N
    # Narrow tiles of tokens while they are too few to give each SM one of 64.
    block_tokens = 16 if num_tokens <= 2112 else 64
    _kernel[(ceil_div(num_tokens, block_tokens),)](
        x_TD, matrix_ED, matrix_ED if bias_E is None else bias_E, expert_ids_TK, expert_weights_TK,
        num_tokens,
        D=hidden, E=matrix_ED.shape[0], K=expert_ids_TK.shape[1],
        EXPERTS=max(16, next_power_of_two(matrix_ED.shape[0])), BLOCK_T=block_tokens, BLOCK_D=128,
        IS_FLOAT32=matrix_ED.dtype != x_TD.dtype or matrix_ED.element_size() == 4,
        HAS_BIAS=bias_E is not None, num_warps=4, num_stages=4 if matrix_ED.element_size() == 2 else 2,
    )  # fmt: skip


def _limits(sizes: Sizes) -> str | None:
    return None if sizes["E"] <= 256 else f"{sizes['E']} experts; takes up to 256"


register(
    Implementation(
        operation="moe_route",
        name="triton",
        function=moe_route,
        band=Band.TUNED,
        device="cuda",
        min_capability=(8, 0),
        formats={"activation": frozenset({"bf16", "float32"})},
        limits=_limits,
        note="logits and choice in one launch",
    )
)
