"""No kernel without a contract, a reference and cases; packages stay empty at their door."""

from __future__ import annotations

from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "rose"
FOLDERS = sorted(p.parent for p in (SOURCE / "kernels").glob("*/__init__.py"))


def test_there_are_kernel_folders():
    assert len(FOLDERS) >= 10


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_kernel_folder_is_whole(folder: Path):
    missing = [n for n in ("contract.py", "reference.py", "cases.py") if not (folder / n).exists()]
    assert not missing, f"{folder.name} lacks {', '.join(missing)}"


def test_package_files_are_empty():
    filled = [
        str(p.relative_to(SOURCE)) for p in SOURCE.glob("*/**/__init__.py") if p.read_text().strip()
    ]
    assert not filled, f"these import things at their door: {filled}"
