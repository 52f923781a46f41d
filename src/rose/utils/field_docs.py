"""The docstrings below the fields of a class, which Python itself forgets."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
import typing


def field_docs(node: type) -> dict[str, str]:
    """Return the docstring below each field of the class itself; empty where the source is not at hand."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(node)))
    except (OSError, TypeError):
        return {}
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs = {}
    for statement, following in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = " ".join(following.value.value.split())
    return docs
