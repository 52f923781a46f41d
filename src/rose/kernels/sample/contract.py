"""One token per row of logits: greedy, or drawn after temperature, top-k, top-p and min-p."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.registry import Operation


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
    """Choose a token per row; the draw depends on (seed, position, token id) only, never on the batch.

    Shapes   S rows, V vocabulary entries
             logits_SV      float32 or bf16; ids that must not be sampled hold -inf, and NaN counts as -inf
             temperature_S  float32; 0 = the largest logit, the lowest id among equals
             top_k_S        int32, 0 = all
             top_p_S        float32 in (0, 1]; tokens are kept, best first (equal: lower id first), until their
                            probability reaches top_p; the one that crosses it is kept
             min_p_S        float32 in [0, 1]: tokens under min_p * largest probability are left out
             seed_S         int64;  position_S int64: index of the token in its sequence
             tokens_S       int64; -1 where the largest logit is not finite, since no token of such a row means anything
    Units    filters apply to softmax(logits / temperature), in the order top_k, top_p, min_p; top_p counts
             probability among what top_k kept (it is renormalised, as users of other engines expect);
             a row of temperature 0 is not filtered
             is_filtered False promises that no row filters (top_k 0, top_p 1, min_p 0): one pass suffices
    Aliasing writes tokens_S
    Source   Gumbel-max: argmax over kept ids of logits / temperature - log(-log(u)), with
             u = (hash(seed, position, id) + 0.5) / 2^32 computed in float32, clamped below 1 - 2^-24,
             hash = mix(mix(mix(lo32(seed) ^ 0x9E3779B9) ^ hi32(seed) ^ 0x85EBCA6B * position) + id), all mod 2^32,
             mix(h) = h ^= h >> 16; h *= 0x7FEB352D; h ^= h >> 15; h *= 0x846CA68B; h ^= h >> 16
    """


OPERATION = Operation(
    name="sample",
    signature=sample,
    sizes=("V",),
    outputs=("tokens_S",),
    formats=("logits",),
)
