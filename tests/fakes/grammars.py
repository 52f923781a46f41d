"""A vocabulary of one token per printable character, two control tokens, and a naive follower of constraints."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer

from fakes.model import VOCAB
from rose.protocol.grammar import Constraint, Grammar, Vocabulary, vocabulary_key

GO, END = 95, 96
assert VOCAB == END + 1


def text_tokens(text: str) -> list[int]:
    """Return one token per character."""
    return [ord(c) - 32 for c in text]


def text_of(token_ids: list[int]) -> str:
    """Return the text of tokens that are none of the control tokens."""
    return "".join(chr(32 + t) for t in token_ids)


def tiny_vocabulary() -> Vocabulary:
    """Return the vocabulary of the fake model."""
    tokens = [bytes([32 + i]) for i in range(GO)] + [b"<go>", b"<end>"]
    control = [GO, END]
    return Vocabulary(
        key=vocabulary_key(tokens, control, END), tokens=tokens, control_ids=control, end_id=END
    )


def constraint(*grammars: tuple[str, list[list[int]]], banned=(), **late) -> Constraint:
    """Return a constraint of (text, starts)."""
    return Constraint(
        vocabulary=tiny_vocabulary().key,
        grammars=[Grammar(text=text, starts=starts) for text, starts in grammars],
        banned_ids=list(banned),
        **late,
    )


class _Source:
    bos_token_id = None
    eos_token_id = END
    is_tokenizer_wrapper = True
    tokens = tiny_vocabulary().tokens
    special_token_ids = (GO, END)

    def __call__(self, text):
        return text_tokens(text if isinstance(text, str) else text.decode())


class NaiveFollower:
    """Which tokens may come next, told from the whole output each time."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._tokens = LLTokenizer(_Source(), n_vocab=VOCAB)

    def allowed(self, output: list[int]) -> set[int]:
        """Return the tokens that may follow an output."""
        matcher = self._begun([])
        for i, token in enumerate(output):
            if matcher is not None:
                assert matcher.consume_token(token)
                matcher = None if matcher.is_stopped() else matcher
            if matcher is None:
                matcher = self._begun(output[: i + 1])
        if matcher is None:
            return set(range(VOCAB)) - set(self._constraint.banned_ids)
        bits = matcher.compute_bitmask()
        return {i for i in range(VOCAB) if bits[i // 8] >> i % 8 & 1}

    def _begun(self, output):
        for grammar in self._constraint.grammars:
            for start in grammar.starts:
                if output[len(output) - len(start) :] == start and (start or not output):
                    return self._matcher(grammar)
        late = self._constraint.late
        if late is None or len(output) < self._constraint.late_after:
            return None
        return self._matcher(self._constraint.grammars[late])

    def _matcher(self, grammar):
        return LLMatcher(self._tokens, LLMatcher.grammar_from_lark(grammar.text))
