"""Shapes -> constraints that travel with requests: written by the formatter, checked by the grammar library, cached.

All of it runs on threads of its own, so that no schema holds up the event loop. `GrammarBuilder.constraint` is what
both APIs call.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec

from rose.frontend.errors import RequestError
from rose.frontend.formatters.base import FormatError, Formatter
from rose.frontend.formatters.shape import (
    ANY_OBJECT,
    AnswerRules,
    AnswerShape,
    FunctionShape,
    JsonSchema,
)
from rose.protocol.grammar import Constraint, Grammar, Vocabulary

CACHED_SHAPES = 256
"""Constraints kept, least recently used given up first; each is about as large as its schema."""
THREADS = 2
"""A build takes a millisecond or two; more threads would only compete with the event loop."""


class GrammarBuilder:
    """Makes the constraints of one formatter."""

    def __init__(self, formatter: Formatter, *, build_seconds: float) -> None:
        self._formatter = formatter
        self._build_seconds = build_seconds
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._built: OrderedDict[bytes, asyncio.Future[Constraint | None]] = OrderedDict()
        self.num_built = 0
        self.num_hits = 0

    @property
    def is_able(self) -> bool:
        """Whether the format has grammars at all."""
        return self._formatter.has_grammars

    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary that the constraints are written for.

        Raises  FormatError where the format has no grammars
        """
        return self._formatter.vocabulary()

    async def constraint(self, shape: AnswerShape, *, param: str) -> Constraint | None:
        """Return what holds an answer to a shape; None for a free one.

        Units    param: the field that errors of the grammar library are told of
        Raises   RequestError where the shape cannot be enforced, or building takes too long
        """
        if shape.is_free:
            return None
        key = msgspec.msgpack.encode([param, msgspec.to_builtins(shape)])
        future = self._built.get(key)
        if future is None or (future.done() and future.cancelled()):
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._threads, self._build, shape, param)
            self._built[key] = future
            self.num_built += 1
        else:
            self.num_hits += 1
        self._built.move_to_end(key)
        while len(self._built) > CACHED_SHAPES:
            self._built.popitem(last=False)
        try:
            # shielded: others may wait for the same shape
            return await asyncio.wait_for(asyncio.shield(future), self._build_seconds)
        except TimeoutError:
            raise RequestError(
                "invalid_request",
                f"{param}: building its grammar took more than {self._build_seconds:g} s; make the schema smaller or "
                "have the server started with a larger --grammar-build-seconds",
                param=param,
            ) from None

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _build(self, shape: AnswerShape, param: str) -> Constraint | None:
        shape = replace(shape, functions=tuple(map(_enforceable, shape.functions)))
        try:
            rules = self._formatter.rules(shape)
            vocabulary = self._formatter.vocabulary()
        except FormatError as error:
            raise RequestError("unsupported_value", str(error), param=param) from error
        if rules is None:
            return None
        _check(shape, rules, param)
        return Constraint(
            vocabulary=vocabulary.key,
            grammars=[
                Grammar(text=rule.text, starts=[list(s) for s in rule.starts])
                for rule in rules.rules
            ],
            banned_ids=list(rules.banned_ids),
        )


def _enforceable(function: FunctionShape) -> FunctionShape:
    if not function.is_best_effort or function.arguments is None:
        return function
    is_fine = schema_problem(function.arguments) is None
    return function if is_fine else replace(function, arguments=ANY_OBJECT)


def _check(shape: AnswerShape, rules: AnswerRules, param: str) -> None:
    """Refuse what the grammar library does not take.

    Raises  RequestError that says in the library's words what it is
    """
    parts = [("", shape.content)]
    parts += [(f" (arguments of {f.name})", f.arguments) for f in shape.functions]
    for where, schema in parts:
        problem = None if schema is None else schema_problem(schema)
        if problem is not None:
            raise RequestError(
                "unsupported_value",
                f"{param}{where}: the schema cannot be enforced: {problem[:500]}; change the schema",
                param=param,
            )
    from llguidance import LLMatcher

    for rule in rules.rules:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(
            LLMatcher.grammar_from_lark(rule.text)
        )
        if is_error:
            raise RequestError(
                "unsupported_value",
                f"{param}: the grammar of the answer cannot be built: {messages[0][:500]}; change the schema",
                param=param,
            )


def schema_problem(schema: JsonSchema) -> str | None:
    """Return why the grammar library does not take a schema, None where it does."""
    from llguidance import LLMatcher

    text = msgspec.json.encode(schema).decode()
    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        LLMatcher.grammar_from_json_schema(text)
    )
    return "; ".join(messages) if is_error or messages else None
