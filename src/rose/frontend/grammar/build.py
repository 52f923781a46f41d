"""Shapes -> constraints that travel with requests: written by the formatter, checked by the grammar library, cached.

All of it runs on threads of its own, so that no schema holds up the event loop, and the library's part in a process
that is killed when it takes too long. Both APIs come here by `JobMaker.constraint`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec

from rose.frontend.errors import RequestError
from rose.frontend.formatters.base import FormatError, Formatter
from rose.frontend.formatters.shape import ANY_OBJECT, AnswerShape, JsonSchema
from rose.frontend.grammar.checker import Checker, CheckerUnavailable, CheckTimeout, Text
from rose.protocol.grammar import Constraint, Grammar, Vocabulary

CACHED_SHAPES = 256
"""Constraints kept, least recently used given up first; each is about as large as its schema."""
THREADS = 2
"""And processes: so that one request whose schema takes long holds up nobody. A build takes 5 ms or so."""
ReadShape = Callable[[], tuple[AnswerShape, str]]
"""Returns a shape that is not free, and the field that errors of the grammar library are told of."""


class GrammarBuilder:
    """Makes the constraints of one formatter."""

    def __init__(self, formatter: Formatter, *, build_seconds: float) -> None:
        self._formatter = formatter
        self._build_seconds = build_seconds
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._checker = Checker(num_processes=THREADS, seconds=build_seconds)
        self._lock = threading.Lock()
        self._built: OrderedDict[bytes, Constraint] = OrderedDict()
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

    async def constraint(self, read: ReadShape) -> Constraint:
        """Return what holds an answer to the shape that `read` returns; reading, too, happens on a thread.

        Raises   RequestError where the shape cannot be enforced, or building takes too long
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._build, read)

    def close(self) -> None:
        """Let threads and processes go."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._checker.close()

    def _build(self, read: ReadShape) -> Constraint:
        """Do it all, on a thread."""
        shape, param = read()
        key = msgspec.msgpack.encode([param, msgspec.to_builtins(shape)])
        with self._lock:
            known = self._built.get(key)
            if known is not None:
                self._built.move_to_end(key)
                self.num_hits += 1
                return known
        constraint = self._constraint(shape, param)
        with self._lock:
            self._built[key] = constraint
            self.num_built += 1
            while len(self._built) > CACHED_SHAPES:
                self._built.popitem(last=False)
        return constraint

    def _constraint(self, shape: AnswerShape, param: str) -> Constraint:
        try:
            shape = self._enforceable(shape, param)
            rules = self._formatter.rules(shape)
            vocabulary = self._formatter.vocabulary()
            assert rules is not None, "the shape asks for something"
            texts = [Text("grammar", rule.text) for rule in rules.rules]
            problem = next(filter(None, self._checker.problems(texts)), None)
        except FormatError as error:
            raise RequestError("unsupported_value", str(error), param=param) from error
        except CheckTimeout:
            raise RequestError(
                "invalid_request",
                f"{param}: building its grammar took more than {self._build_seconds:g} s; make the schema smaller or "
                "have the server started with a larger --grammar-build-seconds",
                param=param,
            ) from None
        except CheckerUnavailable as error:
            raise RequestError(
                "engine_unavailable", f"{param} cannot be checked: {error}; try again later"
            ) from error
        if problem is not None:
            raise _cannot(param, "the grammar of the answer", problem)
        return Constraint(
            vocabulary=vocabulary.key,
            grammars=[
                Grammar(text=rule.text, starts=[list(s) for s in rule.starts])
                for rule in rules.rules
            ],
            banned_ids=list(rules.banned_ids),
            late=rules.late,
        )

    def _enforceable(self, shape: AnswerShape, param: str) -> AnswerShape:
        """Return a shape whose schemas the library takes; what is held to only if possible may become any object.

        Raises  RequestError for others, in the library's words; CheckTimeout
        """
        schemas = [shape.content, *(f.arguments for f in shape.functions)]
        texts = [Text("schema", json_text(s)) for s in schemas if s is not None]
        found = iter(self._checker.problems(texts))
        problems = [None if schema is None else next(found) for schema in schemas]
        if problems[0] is not None:
            raise _cannot(param, "the schema", problems[0])
        functions = []
        for function, problem in zip(shape.functions, problems[1:], strict=True):
            if problem is not None and not function.is_best_effort:
                raise _cannot(param, f"the schema of {function.name}'s arguments", problem)
            functions.append(
                function if problem is None else replace(function, arguments=ANY_OBJECT)
            )
        return replace(shape, functions=tuple(functions))


def json_text(schema: JsonSchema) -> str:
    """Return a schema as the library reads it."""
    return msgspec.json.encode(schema).decode()


def _cannot(param: str, what: str, problem: str) -> RequestError:
    return RequestError(
        "unsupported_value",
        f"{param}: {what} cannot be enforced: {problem}; change the schema",
        param=param,
    )
