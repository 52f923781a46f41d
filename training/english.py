"""General English for training: the documentation inside Python's own standard library (licence PSF-2.0).

The reference manual (`pydoc_data.topics`) and the docstrings of the library's modules, read as text; nothing is
downloaded. The text differs a little between Python versions: the model card names the one used.
"""

import ast
import inspect
import random
import sysconfig
from pathlib import Path

LICENCE = "PSF-2.0"
LEAST_CHARACTERS = 120
"""Docstrings below this are labels, not sentences."""
_LEFT_OUT = ("site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__")


def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [inspect.cleandoc(text) for text in found if text and len(text) >= LEAST_CHARACTERS]


def passages() -> list[str]:
    """Return the passages in a fixed order."""
    from pydoc_data import topics

    texts = [topics.topics[name] for name in sorted(topics.topics)]
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not any(part in _LEFT_OUT for part in path.relative_to(root).parts):
            texts += _docstrings(path)
    return list(dict.fromkeys(texts))


def draw(texts: list[str], source: random.Random, characters: int) -> str:
    """Return passages, joined by blank lines, of about so many characters."""
    drawn: list[str] = []
    while sum(map(len, drawn)) < characters:
        text = source.choice(texts)
        start = source.randrange(max(1, len(text) - characters))
        if start:
            start = text.find(" ", start) + 1
        drawn.append(text[start : start + characters])
    return "\n\n".join(drawn)
