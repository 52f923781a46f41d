"""Sampling in Triton: two launches without filters, four with, and no sort of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.registry import Band, Implementation, register
from rose.kernels.sample.triton_device import (
    choose_kernel,
    count_kernel,
    list_kernel,
    reduce_kernel,
    tile_kernel,
)
from rose.utils.math import ceil_div, next_power_of_two

_BLOCK = 2048
_CHUNK = 128
_BOUNDS = 32
_CAP = 2048
"""Candidates that are sorted in registers; more are searched by bisection."""
_SEARCH_BLOCK = 2048


def sample(
    logits_SV: Tensor,
    temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    min_p_S: Tensor,
    seed_S: Tensor,
    position_S: Tensor,
    *,
    is_filtered: bool,
    tokens_S: Tensor,
) -> None:
    """See the contract."""
    num_rows, vocab = logits_SV.shape
    if num_rows == 0:
        return
    num_tiles = ceil_div(vocab, _BLOCK)
    tiles = max(16, next_power_of_two(num_tiles))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits_SV.device)

    best, best_id = empty(num_rows, num_tiles), empty(num_rows, num_tiles, dtype=torch.int32)
    largest, total = best, best
    if is_filtered:
        largest, total = empty(num_rows, num_tiles), empty(num_rows, num_tiles, dtype=torch.float64)
    tile_kernel[(num_tiles, num_rows)](
        logits_SV, temperature_S, seed_S, position_S, best, best_id, largest, total,
        vocab, num_tiles, BLOCK=_BLOCK, IS_FILTERED=is_filtered,
    )  # fmt: skip
    if not is_filtered:
        reduce_kernel[(num_rows,)](best, best_id, tokens_S, num_tiles, TILES=tiles)
        return
    counts = empty(num_rows, num_tiles, _BOUNDS, dtype=torch.int32)
    masses = empty(num_rows, num_tiles, _BOUNDS)
    count_kernel[(num_tiles, num_rows)](
        logits_SV, temperature_S, top_k_S, top_p_S, min_p_S, largest, total, counts, masses,
        vocab, num_tiles, TILES=tiles, BLOCK=_BLOCK, CHUNK=_CHUNK, BOUNDS=_BOUNDS, num_warps=8,
    )  # fmt: skip
    listed, listed_id = empty(num_rows, vocab), empty(num_rows, vocab, dtype=torch.int32)
    lengths = empty(num_rows, dtype=torch.int32)
    list_kernel[(num_tiles, num_rows)](
        logits_SV, temperature_S, top_k_S, top_p_S, min_p_S, largest, total, counts, masses,
        listed, listed_id, lengths,
        vocab, num_tiles, TILES=tiles, BLOCK=_BLOCK, BOUNDS=_BOUNDS, num_warps=8,
    )  # fmt: skip
    choose_kernel[(num_rows,)](
        temperature_S, top_k_S, top_p_S, min_p_S, seed_S, position_S, largest, total,
        best, best_id, listed, listed_id, lengths, tokens_S,
        vocab, num_tiles, TILES=tiles, CAP=_CAP, BLOCK=_SEARCH_BLOCK, num_warps=8,
    )  # fmt: skip


register(
    Implementation(
        operation="sample",
        name="triton",
        function=sample,
        band=Band.TUNED,
        device="cuda",
        min_capability=(8, 0),
        formats={"logits": frozenset({"float32", "bf16"})},
        note="Gumbel-max over tiles; filters by bounds, then a sort of the few left",
    )
)
