"""What one constrained sequence may say next: plain state that a sequence carries. Knows no queue and no thread."""

from __future__ import annotations

from rose.engine.matchers import Matcher, TokenTrie
from rose.protocol.grammar import Constraint


class GrammarState:
    """What one sequence may say next; the matcher belongs to the thread that works on it."""

    __slots__ = (
        "_matcher",
        "_starts",
        "constraint",
        "free_mask",
        "is_ruling",
        "is_sent",
        "mask",
        "num_seen",
        "trie",
    )

    def __init__(self, constraint: Constraint, trie: TokenTrie) -> None:
        self.constraint = constraint
        self.trie = trie
        self._starts = [(i, s) for i, g in enumerate(constraint.grammars) for s in g.starts]
        self._matcher: Matcher | None = None
        self.is_ruling = False
        """Whether a grammar decides on the next token, so that it waits until the last one is known."""
        self.free_mask = trie.all_but(constraint.banned_ids) if constraint.banned_ids else None
        self.mask: bytes | None = self.free_mask
        """Packed bits of the tokens that may come next; None: all."""
        self.is_sent = False
        """Whether the device has this mask in the sequence's slot."""
        self.num_seen = 0
        """Tokens of the sequence that this state knows of."""

    def started_by(self, token_ids: list[int], first: int) -> int | None:
        """Return which grammar begins to rule after an output that none rules, None for none.

        Units    token_ids: of the sequence; first: the place where its output begins
        """
        for which, start in self._starts:
            place = len(token_ids) - len(start)
            if place >= first and token_ids[place:] == start and (start or place == first):
                return which
        constraint = self.constraint
        is_late = len(token_ids) - first >= constraint.late_after
        return constraint.late if is_late else None

    def build(self, first: int | None) -> Matcher | None:
        """Build every grammar, so that errors come before the first token; then `begin` the first."""
        for grammar in self.constraint.grammars:
            self.trie.prepare(grammar.text)
        return None if first is None else self.begin(first)

    def begin(self, which: int) -> Matcher:
        """Return the matcher at the beginning of a grammar; for one thread at a time, as is `advance`.

        Raises   GrammarError
        """
        self._matcher = self.trie.matcher(self.constraint.grammars[which].text)
        return self._matcher

    def advance(self, token_id: int) -> Matcher:
        """Return the matcher after one more token.

        Raises   GrammarError
        """
        assert self._matcher is not None, "a grammar rules"
        self._matcher.take(token_id)
        return self._matcher

    def set_mask(self, mask: bytes | None) -> None:
        """Take a new mask for the next token."""
        if mask is not self.mask:
            self.mask, self.is_sent = mask, False
