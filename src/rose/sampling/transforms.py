"""Changes of logits before temperature and filters, as a list in the order in which they apply.

Each takes the logits of S rows and changes them in place with torch operators, all rows at once, from device memory
alone. Rows with neutral numbers keep every bit. `reference.py` defines each by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rose.sampling.adjustments import IN_PROMPT, Adjustments

Transform = Callable[[Tensor, Adjustments], None]


def repetition_penalty(logits_SV: Tensor, rows: Adjustments) -> None:
    """Divide positive logits of tokens in prompt or output by the penalty; multiply negative ones."""
    penalty_S1 = rows.repetition_S.unsqueeze(1)
    factor_SV = torch.where(logits_SV > 0, 1 / penalty_S1, penalty_S1)
    logits_SV.mul_(factor_SV.masked_fill_(rows.counts_SV == 0, 1.0))


def frequency_penalty(logits_SV: Tensor, rows: Adjustments) -> None:
    """Take the penalty off once for each time a token stands in the output."""
    count_SV = rows.counts_SV & (IN_PROMPT - 1)
    logits_SV.sub_(count_SV * rows.frequency_S.unsqueeze(1))


def presence_penalty(logits_SV: Tensor, rows: Adjustments) -> None:
    """Take the penalty off tokens that stand in the output."""
    is_present_SV = (rows.counts_SV & (IN_PROMPT - 1)) != 0
    logits_SV.sub_(is_present_SV * rows.presence_S.unsqueeze(1))


def added_logits(logits_SV: Tensor, rows: Adjustments) -> None:
    """Add the bias of single tokens, and -inf to stop tokens below min_tokens."""
    is_due_SE = rows.positions_S.unsqueeze(1) < rows.until_SE
    # masked, not multiplied: -inf times 0 is NaN
    logits_SV.scatter_add_(1, rows.ids_SE, rows.values_SE.masked_fill(~is_due_SE, 0.0))


TRANSFORMS: tuple[tuple[str, Transform], ...] = (
    ("repetition_penalty", repetition_penalty),
    ("frequency_penalty", frequency_penalty),
    ("presence_penalty", presence_penalty),
    ("logit_bias and min_tokens", added_logits),
)
"""In this order; temperature, top_k, top_p and min_p follow in the `sample` operation."""


def adjusted(logits_SV: Tensor, rows: Adjustments) -> Tensor:
    """Return changed logits; graph-safe.

    Aliasing logits_SV stays as it is
    """
    changed_SV = logits_SV.clone()
    for _, transform in TRANSFORMS:
        transform(changed_SV, rows)
    return changed_SV
