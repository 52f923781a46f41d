"""What one step will do, and what came of it: plain data between scheduler, decoder and commit; no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from rose.protocol.event import TokenLogprobs
from rose.protocol.sampling_params import SamplingParams

MAX_HIT_COLUMNS = 16384
"""Page-table columns that the prefix hits of one step fill at most, unless a single one needs more: so much room
is kept for them in the buffers of a step (a million tokens with pages of 64)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHistory:
    """The tokens of a sequence when it takes a slot, for parameters that look back."""

    prompt_ids: list[int]
    output_ids: list[int]
    """Sampled before a preemption; empty otherwise."""
    stop_ids: list[int]


@dataclass(slots=True, kw_only=True)
class PlanEntry:
    """The share of one sequence in a step.

    Aliasing  entries of decoding sequences are reused: they hold until the next `schedule`.
    """

    slot: int
    """Row of the runner's per-sequence device tables; a sequence keeps it while it runs."""
    is_new: bool
    """The slot was just taken: its device rows must be written anew."""
    start_position: int
    """Position of the first token computed in this step."""
    token_ids: list[int] | None
    """Tokens to compute; None: one, the token last sampled for this slot (it is on the device)."""
    num_tokens: int
    is_last_chunk: bool
    """Whether a token is sampled after it (false only inside a chunked prompt)."""
    new_pages: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Layer kind -> (page-table column, page) to write before the step. Columns behind the window keep the
    ids of freed pages: nothing reads them."""
    sampling: SamplingParams | None = None
    """Set when is_new: parameters with the seed filled in."""
    history: SlotHistory | None = None
    """Set when is_new and `sampling` changes logits."""

    @classmethod
    def decode(cls, slot: int, *, position: int = 0) -> PlanEntry:
        """Return the share of a sequence whose last sampled token is computed at `position`."""
        return cls(
            slot=slot,
            is_new=False,
            start_position=position,
            token_ids=None,
            num_tokens=1,
            is_last_chunk=True,
        )


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """Who runs in a step: decode entries first, then prefill entries."""

    step: int
    decode: list[PlanEntry]
    prefill: list[PlanEntry]
    sample_slots: list[int]
    """Slots that sample a token after the step, in the order of the entries."""
    max_length: int
    """Tokens of the longest sequence of the step, the new ones included."""
    masks: dict[int, bytes | None] = field(default_factory=dict)
    """Slot -> packed bits of the tokens that may be sampled, from this step on (bit i % 8 of byte i // 8, whole 32-bit
    words; ids past them may not); None: all. Slots that are not named keep what they have; one just taken has all."""

    @property
    def num_tokens(self) -> int:
        """New tokens of all entries."""
        return len(self.decode) + sum(e.num_tokens for e in self.prefill)


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Tokens per slot that sampled, in the plan's order; one each with the plain decoder."""

    step: int
    token_ids: dict[int, list[int]]
    damaged_slots: frozenset[int] = frozenset()
    """Slots whose logits were not finite: what they have for a token is none."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """One per token, for the slots whose parameters ask for them."""
