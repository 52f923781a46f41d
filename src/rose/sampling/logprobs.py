"""Log-probabilities of sampled tokens and of the best ones. Knows no sequences and no host."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rose.protocol.sampling_params import MAX_TOP_LOGPROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Of S rows.

    Shapes   K = min(20, V);  chosen_S, top_SK float32;  top_ids_SK int64, best first
    """

    chosen_S: Tensor
    top_SK: Tensor
    top_ids_SK: Tensor


def logprobs(logits_SV: Tensor, tokens_S: Tensor) -> Logprobs:
    """Return log softmax(logits) at the tokens and at the best ids; graph-safe.

    Shapes   logits_SV float32, as the model gave them, without columns past the vocabulary
    """
    norm_S1 = logits_SV.logsumexp(dim=-1, keepdim=True)
    top_SK, top_ids_SK = logits_SV.topk(min(MAX_TOP_LOGPROBS, logits_SV.shape[1]), dim=-1)
    # padding rows, whose logits may be NaN, need not have a token of the vocabulary
    ids_S1 = tokens_S.clamp(0, logits_SV.shape[1] - 1).unsqueeze(1)
    chosen_S1 = logits_SV.gather(1, ids_S1) - norm_S1
    return Logprobs(chosen_S=chosen_S1.squeeze(1), top_SK=top_SK - norm_S1, top_ids_SK=top_ids_SK)
