"""Links between pages lead somewhere: files exist, anchors are headings, no page of experiments is forgotten."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/unbound/README.md")),
)
LINK = re.compile(r"\]\(([^()\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)
MENTION = re.compile(r"\bdocs/[\w/]+\.md\b")
TEXT = {".py", ".cu", ".cuh", ".md", ".toml", ".yml", ".sh", ".patch"}


def _anchors(page: Path) -> set[str]:
    """Return what GitHub makes of its headings: lower case, no punctuation, a number behind what stood before."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCED.sub("", page.read_text())):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = first = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while slug in found:
            number += 1
            slug = f"{first}-{number}"
        found.add(slug)
    return found


def _broken(page: Path) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    broken = []
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_and_anchors_resolve(page: Path):
    assert _broken(page) == []


def test_a_link_to_a_missing_file_or_heading_is_found(tmp_path):
    (tmp_path / "b.md").write_text("# One `two`, three's\n\n## Again\n\n## Again\n")
    page = tmp_path / "a.md"
    right = "[x](b.md) [x](b.md#one-two-threes) [x](b.md#again-1) [x](https://example.org/#y)"
    page.write_text(f"# Here\n\n{right} [x](#here)\n[x](c.md) [x](b.md#again-2) [x](#there)\n")
    assert _broken(page) == ["c.md", "b.md#again-2", "#there"]


def test_pages_that_code_and_text_mention_exist():
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\0")
    if not any(names):
        pytest.skip("not a git checkout")
    files = [ROOT / n for n in names if Path(n).suffix in TEXT and not n.startswith("tests/")]
    mentions = {
        (str(file.relative_to(ROOT)), name)
        for file in files
        if file.exists()
        for name in MENTION.findall(file.read_text())
    }
    assert len(mentions) > 20
    assert [m for m in sorted(mentions) if not (ROOT / m[1]).exists()] == []


def test_performance_page_leads_to_every_experiment():
    linked = set(LINK.findall((ROOT / "docs/performance.md").read_text()))
    pages = {f"experiments/{p.name}" for p in (ROOT / "docs/experiments").glob("*.md")}
    assert len(pages) >= 10
    assert pages - linked == set()
