"""What an answer has to look like, in words that both APIs and every formatter share. Knows no grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

JsonSchema = dict[str, Any]
ANY_OBJECT: JsonSchema = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionShape:
    """A function that may be called."""

    name: str
    arguments: JsonSchema | None
    """What its arguments are held to; None: whatever the model writes."""
    is_best_effort: bool = False
    """Where that cannot be enforced, any JSON object will do: nobody asked for strict arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """The form an answer is held to. Reasoning stays free."""

    content: JsonSchema | None = None
    """What the text for the user must be as JSON; None: any text."""
    functions: tuple[FunctionShape, ...] = ()
    """Those that may be called."""
    must_call: bool = False
    """The answer is a call of one of the functions."""
    is_limited: bool = False
    """Calls of other functions must not happen, though the answer would otherwise be free."""

    @property
    def is_free(self) -> bool:
        """Whether nothing needs to be enforced."""
        holds_arguments = any(f.arguments is not None for f in self.functions)
        return not (
            self.content is not None or self.must_call or self.is_limited or holds_arguments
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRule:
    """A grammar and where it begins to rule; see `rose.protocol.grammar.Grammar`."""

    text: str
    starts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """An AnswerShape in one prompt format."""

    rules: tuple[AnswerRule, ...]
    banned_ids: tuple[int, ...]
    """Never chosen while no rule rules."""
    late: int | None = None
    """Place of the rule that ends what is free, where the answer would otherwise not come; None: nothing need come."""
