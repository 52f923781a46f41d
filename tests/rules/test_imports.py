"""Imports go downwards only, as the table of docs/architecture.md says, and what promises to run without torch does."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "rose"
OPERATIONS = {p.parent.name for p in SOURCE.glob("kernels/*/contract.py")}
MODELS = {p.parent.name for p in SOURCE.glob("models/*/config.py")}
EVERYTHING = "everything"
NO_CODE = {"assets"}


def _table() -> dict[str, tuple[set[str], set[str]]]:
    """Return, per package of the page, what of rose it may import and what libraries never."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = {}
    for line in page.partition("## Who may import whom")[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 3 or cells[0] == "package" or cells[0].startswith("-"):
            continue
        allowed, never = (set(re.findall(r"`([\w.]+)`", cell)) for cell in cells[1:])
        table[cells[0]] = ({EVERYTHING} if cells[1].startswith(EVERYTHING) else allowed, never)
    return table


TABLE = _table()


@cache
def _imports(path: Path) -> list[str]:
    """Return the dotted names a file imports outside `if TYPE_CHECKING`."""
    names = []
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            # `from rose.runtime import plan` names a module too.
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        pending.extend(ast.iter_child_nodes(node))
    return names


def _files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def _package(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else ""


def _is_allowed(importer: str, imported: str) -> bool:
    parts = imported.split(".")[1:]
    allowed, _ = TABLE[importer]
    if not parts or parts[0] == importer or EVERYTHING in allowed:
        return True
    return any(".".join(parts[:depth]) in allowed for depth in range(1, len(parts) + 1))


def _rose_imports() -> list[tuple[Path, str]]:
    return [
        (path.relative_to(SOURCE), name)
        for path in _files()
        if _package(path)
        for name in _imports(path)
        if name.split(".")[0] == "rose"
    ]


def test_the_table_has_exactly_the_packages_that_exist():
    assert set(TABLE) == {_package(path) for path in _files()} - {""} - NO_CODE


def test_the_table_has_no_cycle():
    def reach(package: str, seen: tuple[str, ...]) -> None:
        assert package not in seen, f"cycle: {' -> '.join((*seen, package))}"
        for name in TABLE[package][0] - {EVERYTHING}:
            reach(name.split(".")[0], (*seen, package))

    for package in TABLE:
        reach(package, ())


def test_imports_go_downwards_only():
    upward = [
        f"{path} imports {name}"
        for path, name in _rose_imports()
        if not _is_allowed(path.parts[0], name)
    ]
    assert not upward, "\n".join(upward)


def test_an_upward_import_would_be_found(tmp_path):
    source = tmp_path / "bad.py"
    source.write_text("from rose.engine import engine\nimport rose.utils.math\n")
    assert [_is_allowed("protocol", name) for name in _imports(source)] == [True, False]
    assert not _is_allowed("bench", "rose.server.main.run")
    assert not _is_allowed("engine", "rose.runtime.runner.ModelRunner")


def _crosses(path: Path, name: str, package: str, folders: set[str]) -> bool:
    """Tell whether a file in one folder of a package imports out of a folder beside it."""
    if path.parts[0] != package or path.parts[1] not in folders:
        return False
    parts = [*name.split("."), "", "", ""]
    return parts[1] == package and parts[2] in folders - {path.parts[1]}


def test_operations_share_nothing_but_references():
    crossing = [
        f"{path} imports {name}"
        for path, name in _rose_imports()
        if _crosses(path, name, "kernels", OPERATIONS)
        and not (path.name == "reference.py" and name.split(".")[3] == "reference")
    ]
    assert not crossing, "\n".join(crossing)


def test_models_share_nothing():
    crossing = [
        f"{path} imports {name}"
        for path, name in _rose_imports()
        if _crosses(path, name, "models", MODELS)
    ]
    assert not crossing, "\n".join(crossing)


def test_a_crossing_would_be_found():
    path = Path("kernels/gemm/triton_impl.py")
    assert _crosses(path, "rose.kernels.moe_route.reference.reference", "kernels", OPERATIONS)
    assert not _crosses(path, "rose.kernels.gemm.reference.reference", "kernels", OPERATIONS)
    assert not _crosses(path, "rose.kernels.registry.register", "kernels", OPERATIONS)


@pytest.mark.parametrize("package", sorted(TABLE))
def test_no_file_names_a_library_its_package_does_without(package):
    _, never = TABLE[package]
    is_late_allowed = EVERYTHING in TABLE[package][0]  # inside command bodies
    wrong = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in _files()
        if _package(path) == package
        for name in (_imports_at_import(path) if is_late_allowed else _imports(path))
        if name.split(".")[0] in never
    ]
    assert not wrong, "\n".join(wrong)


def _imports_at_import(path: Path) -> list[str]:
    body = ast.parse(path.read_text()).body
    nodes = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    return [
        alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
        for node in nodes
        for alias in node.names
    ]


def _modules(*packages: str) -> list[str]:
    found = []
    for path in _files():
        relative = path.relative_to(SOURCE.parent)
        if _package(path) in packages and path.name != "__main__.py":
            parts = relative.with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_frontend_config_protocol_commands_and_scheduler_import_without(missing):
    modules = _modules("frontend", "config", "protocol", "cli")
    modules += ["rose.engine.scheduler", "rose.server.scripted", "rose.server.launch"]
    # None in sys.modules makes every `import torch` raise, as on a machine without it.
    program = f"import sys\nsys.modules[{missing!r}] = None\nimport " + ", ".join(modules)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
