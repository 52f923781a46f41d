"""The control tokens of Harmony, looked up by name in whatever vocabulary serves."""

from __future__ import annotations

from dataclasses import dataclass

from rose.frontend.tokenizer import Tokenizer

CONSTRAIN_NAME = "<|constrain|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyTokens:
    """Ids of the control tokens; `end` separates messages, `return_` and `call` end generation."""

    start: int
    message: int
    channel: int
    constrain: int
    end: int
    return_: int
    call: int

    @property
    def stops(self) -> list[int]:
        """Return the ids that end generation of an assistant's turn."""
        return [self.return_, self.call]

    @property
    def terminators(self) -> frozenset[int]:
        """Return the ids that end a message."""
        return frozenset((self.end, self.return_, self.call))


def harmony_tokens(tokenizer: Tokenizer) -> HarmonyTokens:
    """Look the control tokens up.

    Raises   CheckpointError that names the first one the vocabulary lacks
    """
    return HarmonyTokens(
        start=tokenizer.control_id("<|start|>"),
        message=tokenizer.control_id("<|message|>"),
        channel=tokenizer.control_id("<|channel|>"),
        constrain=tokenizer.control_id(CONSTRAIN_NAME),
        end=tokenizer.control_id("<|end|>"),
        return_=tokenizer.control_id("<|return|>"),
        call=tokenizer.control_id("<|call|>"),
    )
