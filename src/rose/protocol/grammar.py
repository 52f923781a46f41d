"""Grammars as they travel: plain data about tokens. The engine learns the bytes of tokens, and no text format.

A vocabulary is sent once; a request names it by key and brings its grammars as text for the grammar library
(llguidance: Lark, with JSON schemas inside), each with the token sequences after which it begins to rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

MAX_GRAMMARS = 64
"""Of one request; each is built and held by the engine."""


class Vocabulary(
    msgspec.Struct, frozen=True, kw_only=True, tag="vocabulary", forbid_unknown_fields=True
):
    """The bytes of every token; sent once by each frontend, and again to an engine that was started anew."""

    key: str
    """What requests name it by: `vocabulary_key` of the rest."""
    tokens: list[bytes]
    """By id. Empty: no text is ever written with this token."""
    control_ids: list[int]
    """Tokens that are no text; a grammar names them by id."""
    end_id: int
    """The control token that is allowed, beside what goes on, where a grammar may end or go on."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What tokens may follow a place in the output. When it is complete it no longer rules."""

    text: str
    starts: list[list[int]]
    """Token sequences of the output after which it rules; an empty one: from the first token on."""


class Constraint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The grammars of one request. Tokens that no grammar rules are chosen freely and never wait."""

    vocabulary: str
    """Key of the vocabulary that the grammars are written for."""
    grammars: list[Grammar]
    banned_ids: list[int] = []
    """Never chosen while no grammar rules."""
    late: int | None = None
    """Place in `grammars` of the one that also begins to rule after `late_after` tokens of output, where none does."""
    late_after: int = 0

    def problems(self) -> list[str]:
        """Return what makes no sense, as asked / allowed."""
        count = len(self.grammars)
        problems = []
        if count > MAX_GRAMMARS:
            problems.append(f"constraint has {count} grammars; allowed: {MAX_GRAMMARS} at most")
        if self.late is not None and not 0 <= self.late < count:
            problems.append(f"late={self.late}; allowed: a place among {count} grammars, or none")
        return problems


def vocabulary_key(tokens: Iterable[bytes], control_ids: Iterable[int], end_id: int) -> str:
    """Return the key of a vocabulary: equal for equal ones only."""
    digest = hashlib.sha256(repr((sorted(control_ids), end_id)).encode())
    for token in tokens:
        digest.update(len(token).to_bytes(4, "little") + token)
    return digest.hexdigest()
