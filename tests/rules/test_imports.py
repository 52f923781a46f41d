"""Imports go downwards only, and the parts that promise to run without torch do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "rose"

# Package -> rose packages it may import; a dotted entry allows that module alone.
# docs/architecture.md has the same table in words.
ALLOWED: dict[str, set[str]] = {
    "utils": set(),
    "config": {"utils"},
    "protocol": {"utils"},
    "frontend": {"protocol", "utils"},
    "kernels": {"utils"},
    "quant": {"kernels", "config", "utils"},
    "parallel": {"kernels", "config", "utils"},
    "weights": {"quant", "parallel", "kernels", "config", "utils"},
    "layers": {"kernels", "quant", "parallel", "weights", "config", "utils"},
    "models": {"layers", "weights", "quant", "parallel", "kernels", "config", "utils"},
    "cache": {"layers.context", "kernels", "config", "utils"},
    "sampling": {"kernels", "protocol", "config", "utils"},
    "runtime": {
        *("models", "layers", "cache", "sampling", "parallel", "weights", "quant", "kernels"),
        *("protocol", "config", "utils"),
    },
    "decoders": {"runtime", "sampling", "cache", "models", "protocol", "config", "utils"},
    "engine": {"decoders", "runtime.plan", "cache", "sampling", "protocol", "config", "utils"},
    "server": {
        *("engine", "decoders", "runtime", "models", "weights", "layers", "parallel", "cache"),
        *("sampling", "quant", "kernels", "protocol", "config", "utils"),
    },
    "disagg": {"server", "engine", "decoders", "runtime", "cache", "protocol", "config", "utils"},
}
# Above everything: the command line, the measuring tools, files that are no code.
FREE = {"cli", "bench", "assets"}
NEVER_TORCH = ("frontend", "config", "protocol")


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
    if not parts or parts[0] == importer:
        return True
    allowed = ALLOWED[importer]
    return any(".".join(parts[:depth]) in allowed for depth in range(1, len(parts) + 1))


def test_every_package_is_in_the_table():
    packages = {_package(path) for path in _files()} - {""}
    assert packages <= set(ALLOWED) | FREE


def test_the_table_has_no_cycle():
    def reach(package: str, seen: tuple[str, ...]) -> None:
        assert package not in seen, f"cycle: {' -> '.join((*seen, package))}"
        for name in ALLOWED[package]:
            reach(name.split(".")[0], (*seen, package))

    for package in ALLOWED:
        reach(package, ())


def test_imports_go_downwards_only():
    upward = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in _files()
        if _package(path) not in FREE | {""}
        for name in _imports(path)
        if name.split(".")[0] == "rose" and not _is_allowed(_package(path), name)
    ]
    assert not upward, "\n".join(upward)


def test_an_upward_import_would_be_found(tmp_path):
    source = tmp_path / "bad.py"
    source.write_text("from rose.engine import engine\nimport rose.utils.math\n")
    assert [_is_allowed("protocol", name) for name in _imports(source)] == [True, False]


def test_packages_without_torch_never_name_it():
    wrong = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in _files()
        if _package(path) in NEVER_TORCH
        for name in _imports(path)
        if name.split(".")[0] in ("torch", "transformers", "triton", "numpy")
    ]
    assert not wrong, "\n".join(wrong)


def _modules(*packages: str) -> list[str]:
    found = []
    for path in _files():
        relative = path.relative_to(SOURCE.parent)
        if _package(path) in packages and path.name != "__main__.py":
            parts = relative.with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_frontend_config_protocol_and_scheduler_import_without(missing):
    modules = _modules("frontend", "config", "protocol")
    modules += ["rose.engine.scheduler", "rose.server.scripted", "rose.server.launch"]
    modules += ["rose.cli.serve", "rose.cli.chat", "rose.cli.env", "rose.cli.scripts"]
    # None in sys.modules makes every `import torch` raise, as on a machine without it.
    program = f"import sys\nsys.modules[{missing!r}] = None\nimport " + ", ".join(modules)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
