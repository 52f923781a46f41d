"""What one constrained sequence may say next: plain state that a sequence carries. Knows no queue and no thread."""

from __future__ import annotations

from rose.engine.matchers import Matcher, TokenTrie
from rose.protocol.grammar import Constraint


class GrammarState:
    """What one sequence may say next; the matcher belongs to the thread that works on it."""

    __slots__ = (
        "constraint",
        "free_mask",
        "is_ruling",
        "is_sent",
        "mask",
        "matcher",
        "num_seen",
        "trie",
    )

    def __init__(self, constraint: Constraint, trie: TokenTrie) -> None:
        self.constraint = constraint
        self.trie = trie
        self.matcher: Matcher | None = None
        self.is_ruling = False
        """Whether a grammar decides on the next token, so that it waits until the last one is known."""
        self.free_mask = trie.all_but(constraint.banned_ids) if constraint.banned_ids else None
        self.mask: bytes | None = self.free_mask
        """Packed bits of the tokens that may come next; None: all."""
        self.is_sent = False
        """Whether the device has this mask in the sequence's slot."""
        self.num_seen = 0
        """Tokens of the sequence that this state knows of."""

    def started_by(self, output_ids: list[int]) -> int | None:
        """Return which grammar begins to rule after an output, None for none."""
        for i, grammar in enumerate(self.constraint.grammars):
            for start in grammar.starts:
                if start == output_ids[len(output_ids) - len(start) :] and (
                    start or not output_ids
                ):
                    return i
        return None

    def set_mask(self, mask: bytes | None) -> None:
        """Take a new mask for the next token."""
        if mask is not self.mask:
            self.mask, self.is_sent = mask, False
