"""How a request wants its tokens chosen."""

from __future__ import annotations

import msgspec

MAX_BIASES = 1024
"""Tokens that one request may bias; each takes a place in a table of the device."""
MAX_TOP_LOGPROBS = 20
"""Alternatives per token, as OpenAI allows."""
MAX_BANNED = 64
"""Stop tokens that `min_tokens` can hold off."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers that steer sampling; `problems` checks them, nothing is clamped silently."""

    temperature: float = 1.0
    """0 to 100; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    seed: int | None = None
    """None: the engine draws one. Equal seeds give equal tokens whatever shares the batch."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by it where positive, multiplied where negative."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit once for each time it stands in the output."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that stand in the output."""
    logit_bias: dict[int, float] = {}
    """Token id -> what is added to its logit."""
    min_tokens: int = 0
    """Output tokens before which no stop token is sampled; the stop token itself is not one of them."""
    logprobs: int | None = None
    """Report the log-probability of each token and of this many best ones; None: nothing. Of softmax(logits) as
    the model gave them: before penalties, bias, temperature and filters."""

    @property
    def counts_tokens(self) -> bool:
        """Whether choosing a token takes knowing which tokens came before."""
        return bool(
            self.repetition_penalty != 1.0 or self.frequency_penalty or self.presence_penalty
        )

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before temperature and filters."""
        return self.counts_tokens or bool(self.logit_bias) or self.min_tokens > 0

    def problems(self) -> list[str]:
        """Return every field out of range, as asked / allowed."""
        return self._problems_of_choice() + self._problems_of_logits()

    def _problems_of_choice(self) -> list[str]:
        checks = (
            (
                0.0 <= self.temperature <= 100.0,
                f"temperature={self.temperature}; allowed: 0 to 100",
            ),
            (0.0 < self.top_p <= 1.0, f"top_p={self.top_p}; allowed: above 0, at most 1"),
            # more than 64 bits cannot travel to the engine
            (
                0 <= self.top_k < 2**63,
                f"top_k={self.top_k}; allowed: 1 to {2**63 - 1}, or 0 for all (over HTTP also -1)",
            ),
            (0.0 <= self.min_p <= 1.0, f"min_p={self.min_p}; allowed: 0 to 1"),
            (
                self.seed is None or -(2**63) <= self.seed < 2**63,
                f"seed={self.seed}; allowed: a signed 64-bit integer",
            ),
        )
        return [text for is_right, text in checks if not is_right]

    def _problems_of_logits(self) -> list[str]:
        """See `problems`: what changes logits or reports them."""
        bias, counts = self.logit_bias, (None, *range(MAX_TOP_LOGPROBS + 1))
        wrong = [(i, b) for i, b in bias.items() if i < 0 or not -100.0 <= b <= 100.0]
        checks = (
            (
                0.01 <= self.repetition_penalty <= 100.0,
                f"repetition_penalty={self.repetition_penalty}; allowed: 0.01 to 100",
            ),
            (
                -2.0 <= self.frequency_penalty <= 2.0,
                f"frequency_penalty={self.frequency_penalty}; allowed: -2 to 2",
            ),
            (
                -2.0 <= self.presence_penalty <= 2.0,
                f"presence_penalty={self.presence_penalty}; allowed: -2 to 2",
            ),
            (
                len(bias) <= MAX_BIASES,
                f"logit_bias has {len(bias)} tokens; allowed: {MAX_BIASES} at most",
            ),
            (not wrong, f"logit_bias has {wrong[:1]}; allowed: token ids with -100 to 100 each"),
            (
                0 <= self.min_tokens < 2**31,
                f"min_tokens={self.min_tokens}; allowed: 0 to {2**31 - 1}",
            ),
            (
                self.logprobs in counts,
                f"logprobs={self.logprobs}; allowed: none or 0 to {MAX_TOP_LOGPROBS}",
            ),
        )
        return [text for is_right, text in checks if not is_right]
