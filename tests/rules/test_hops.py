"""docs/life_of_a_request.md names places that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/life_of_a_request.md"
HOP = re.compile(r"^\| \d+ \| (\S+\.py) : ([\w.]+) \|", re.MULTILINE)


def hops() -> list[tuple[str, str]]:
    """Return (file, dotted name) of every row."""
    return HOP.findall(PAGE.read_text())


def test_the_page_lists_all_hops():
    assert len(hops()) == 16


def test_files_named_in_the_text_exist():
    named = re.findall(r"`([\w/]+\.py)`", PAGE.read_text())
    assert named
    wrong = [f for f in named if not any((ROOT / d / f).is_file() for d in ("src/rose", "."))]
    assert not wrong, f"neither below src/rose nor below the root: {wrong}"


@pytest.mark.parametrize(("file", "name"), hops())
def test_hop_exists(file: str, name: str):
    node: ast.AST = ast.parse((ROOT / "src/rose" / file).read_text())
    for part in name.split("."):
        found = [
            n
            for n in ast.iter_child_nodes(node)
            if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and n.name == part
        ]
        assert found, f"{file} has no {part} of {name}"
        node = found[0]
