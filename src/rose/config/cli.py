"""Configuration trees as command-line options, generically: one option per field, no hand-kept list.

Knows dataclasses and strings, no command-line library: `rose.cli` turns an `Option` into what its library wants.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rose.utils.errors import ConfigError
from rose.utils.field_docs import field_docs

Tree = TypeVar("Tree")
Path = tuple[str, ...]
_ADVICE = "change|raise|lower|or|and"
"""Words before the name of a leaf where a message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One leaf of a configuration tree."""

    path: Path
    """Field names from the root, as in ("cache", "page_tokens")."""
    flags: tuple[str, ...]
    """--page-tokens where that is unambiguous, and always --cache.page-tokens; time-outs also without -s."""
    kind: type
    """str, int, float or bool; of the items where is_repeated."""
    is_repeated: bool = False
    is_mapping: bool = False
    """Repeated, each NAME=VALUE."""
    choices: tuple[str, ...] = ()
    default: Any = None
    help: str = ""


def options(*roots: type, skip: frozenset[str] = frozenset()) -> list[Option]:
    """List the options of all leaves of these dataclasses.

    `skip` names leaves (dotted) that are given another way. A short flag that two leaves would share is left out.
    """
    leaves = [leaf for root in roots for leaf in _leaves(root, ())]
    leaves = [leaf for leaf in leaves if ".".join(leaf[0]) not in skip]
    uses = Counter(path[-1] for path, *_ in leaves)
    return [_option(*leaf, has_short=uses[leaf[0][-1]] == 1) for leaf in leaves]


def build(root: type[Tree], values: Mapping[Path, Any]) -> Tree:
    """Build the tree from the leaves given; the others keep their defaults.

    Raises  ConfigError with the problems of every node at once.
    """
    problems: list[str] = []
    tree = _build(root, (), values, problems)
    if problems:
        raise ConfigError(problems)
    return tree


def with_flags(text: str, options: Iterable[Option]) -> str:
    """Return a message about the tree with the flags that a person types: "change quant.weights" becomes
    "change --weights (quant.weights)".

    Only what a message tells to change is named so; "context_tokens=5" stays what was found.
    """
    for option in options:
        dotted = ".".join(option.path)
        place = "" if len(option.path) == 1 else f" ({dotted})"
        pattern = rf"\b({_ADVICE}) {re.escape(dotted)}(?![\w=-]|\.\w)"
        text = re.sub(pattern, rf"\1 {option.flags[0]}{place}", text)
    return text


def _build(node: type, prefix: Path, values: Mapping[Path, Any], problems: list[str]) -> Any:
    arguments: dict[str, Any] = {}
    for field_name, annotation in _annotations(node).items():
        path = (*prefix, field_name)
        if dataclasses.is_dataclass(annotation):
            arguments[field_name] = _build(typing.cast(type, annotation), path, values, problems)
        elif path in values:
            arguments[field_name] = values[path]
    try:
        # A child with problems is None here; its parent's own checks wait until the child is right.
        return None if None in arguments.values() and problems else node(**arguments)
    except ConfigError as error:
        problems.extend(error.problems)
        return None


def _leaves(node: type, prefix: Path) -> list[tuple[Path, Any, Any, str]]:
    found = []
    helps = field_docs(node)
    annotations = _annotations(node)
    for field in dataclasses.fields(node):
        annotation = annotations[field.name]
        path = (*prefix, field.name)
        if dataclasses.is_dataclass(annotation):
            found += _leaves(typing.cast(type, annotation), path)
        else:
            found.append((path, annotation, _default(field), helps.get(field.name, "")))
    return found


def _option(path: Path, annotation: Any, default: Any, text: str, *, has_short: bool) -> Option:
    dotted = "--" + ".".join(path).replace("_", "-")
    short = "--" + path[-1].replace("_", "-")
    flags = (short, dotted) if has_short and short != dotted else (dotted,)
    if has_short and path[-1].endswith("_timeout_s"):
        # Seconds are what everybody means: --shutdown-timeout beside --shutdown-timeout-s.
        flags = (*flags, short.removesuffix("-s"))
    kind, is_repeated, is_mapping, choices = _shape(annotation, path)
    return Option(
        path=path,
        flags=flags,
        kind=kind,
        is_repeated=is_repeated,
        is_mapping=is_mapping,
        choices=choices,
        default=default,
        help=text,
    )


def _shape(annotation: Any, path: Path) -> tuple[type, bool, bool, tuple[str, ...]]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        if len(inner) == 1:
            return _shape(inner[0], path)
    if origin is Literal:
        return str, False, False, tuple(str(argument) for argument in arguments)
    if origin is dict and arguments == (str, str):
        return str, True, True, ()
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return arguments[0], True, False, ()
    if annotation in (str, int, float, bool):
        return annotation, False, False, ()
    raise TypeError(
        f"field {'.'.join(path)} has type {annotation}, which no option can express; allowed: str, int, float, "
        "bool, Literal, tuple[T, ...], dict[str, str] and any of them or None; change the field or _shape"
    )


def _annotations(node: type) -> dict[str, Any]:
    hints = typing.get_type_hints(node)
    return {field.name: hints[field.name] for field in dataclasses.fields(node)}  # type: ignore[arg-type]


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None
