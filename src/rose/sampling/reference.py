"""Changed logits by their definitions: one row, token by token, in plain Python and float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rose.protocol.sampling_params import SamplingParams


def adjusted(
    logits: Sequence[float],
    sampling: SamplingParams,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    stop_ids: Sequence[int],
) -> list[float]:
    """Return the logits of the token after `output_ids`; see `SamplingParams` for each number."""
    counts, seen = Counter(output_ids), {*prompt_ids, *output_ids}
    changed = []
    for token, logit in enumerate(logits):
        if token in seen:
            penalty = sampling.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= counts[token] * sampling.frequency_penalty
        if counts[token]:
            logit -= sampling.presence_penalty
        logit += sampling.logit_bias.get(token, 0.0)
        if token in stop_ids and len(output_ids) < sampling.min_tokens:
            logit = float("-inf")
        changed.append(logit)
    return changed
