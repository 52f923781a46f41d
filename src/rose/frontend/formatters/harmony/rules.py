"""The shape of an answer as grammars over Harmony's tokens: which headers may be written, and what follows them.

Only what must be held to a form waits for a grammar: headers, JSON and calls. Reasoning, and text that may be anything,
is free but for control tokens. See docs/grammars.md. Knows no engine; it writes the grammar library's Lark dialect.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from rose.frontend.formatters.harmony.messages import FUNCTIONS
from rose.frontend.formatters.harmony.tokens import harmony_tokens
from rose.frontend.formatters.shape import (
    ANY_OBJECT,
    AnswerRule,
    AnswerRules,
    AnswerShape,
    FunctionShape,
    JsonSchema,
)
from rose.frontend.tokenizer import Tokenizer, control_ids

JSON_STYLE = {"whitespace_pattern": r" |\n {0,32}"}
"""Blanks between the parts of JSON: one, or a line break with its indentation. Without a bound a model can go on
with blanks until its tokens are used up."""


class HarmonyRules:
    """Writes rules with one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens = harmony_tokens(tokenizer)
        self._control = frozenset(control_ids(tokenizer))

    def rules(self, shape: AnswerShape) -> AnswerRules | None:
        """Return the grammars of a shape, None where it asks for nothing."""
        if shape.is_free:
            return None
        is_open = shape.content is None and not shape.must_call
        ends = {self._tokens.end, *(self._tokens.stops if is_open else ())}
        later = [self._lit(self._tokens.start), self._text("assistant")]
        first, rest = self._messages(shape, is_open=is_open)
        rules = [
            AnswerRule(text=_lark([], first), starts=((),)),
            AnswerRule(text=_lark(later, rest), starts=((self._tokens.end,),)),
        ]
        if not is_open:
            late = [self._lit(self._tokens.end), *later]
            rules.append(AnswerRule(text=_lark(late, rest), starts=()))
        return AnswerRules(
            rules=tuple(rules),
            banned_ids=tuple(sorted(self._control - ends)),
            late=None if is_open else len(rules) - 1,
        )

    def _messages(
        self, shape: AnswerShape, *, is_open: bool
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return the messages that the answer may begin with, and those after another one.

        Where the answer is held to a form there is one piece of reasoning at most, so that the answer comes.
        """
        reasoning = {"analysis": self._header("analysis")}
        answers: dict[str, str] = {}
        if is_open:
            answers["preamble"] = self._header("commentary")
            answers["final"] = self._header("final")
        elif not shape.must_call:
            assert shape.content is not None, "an answer without calls and content is open"
            header = self._header("final", with_type=True)
            answers["final"] = f"{header} {_json(shape.content)} {self._lit(self._tokens.return_)}"
        for i, function in enumerate(shape.functions):
            answers[f"call_{i}"] = self._call(function, is_open=is_open)
        return {**reasoning, **answers}, ({**reasoning, **answers} if is_open else answers)

    def _call(self, function: FunctionShape, *, is_open: bool) -> str:
        """Return a call, its recipient in either section of the header."""
        recipient = self._text(f" to={FUNCTIONS}.{function.name}")
        channel, commentary = self._lit(self._tokens.channel), self._text("commentary")
        header = f"({channel} {commentary} {recipient} | {recipient} {channel} {commentary})"
        header = f"{header} {self._type} {self._lit(self._tokens.message)}"
        arguments = function.arguments
        if arguments is None and is_open:
            return header  # what follows is free
        body = _json(ANY_OBJECT if arguments is None else arguments)
        return f"{header} {body} {self._lit(self._tokens.call)}"

    def _header(self, channel: str, *, with_type: bool = False) -> str:
        parts = [self._lit(self._tokens.channel), self._text(channel)]
        parts += [self._type] if with_type else []
        return " ".join([*parts, self._lit(self._tokens.message)])

    @property
    def _type(self) -> str:
        """The content type, which may be left out."""
        blank, constrain = self._text(" "), self._lit(self._tokens.constrain)
        return f"({blank} {constrain} {self._text('json')} | {self._text(' json')})?"

    def _text(self, text: str) -> str:
        """Return text as the very tokens that the model was trained on."""
        return self._lit(*self._tokenizer.encode(text))

    def _lit(self, *token_ids: int) -> str:
        return " ".join(f"<[{token_id}]>" for token_id in token_ids)


def _lark(prefix: Iterable[str], messages: dict[str, str]) -> str:
    """Return a grammar: one of the messages after the prefix."""
    lines = [f"start: {' '.join([*prefix, '(' + ' | '.join(messages) + ')'])}"]
    lines += [f"{name}: {body}" for name, body in messages.items()]
    return "\n".join(lines)


def _json(schema: JsonSchema) -> str:
    styled = {**schema, "x-guidance": JSON_STYLE}
    return f"%json {json.dumps(styled, ensure_ascii=True)}"
