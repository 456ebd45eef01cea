"""The project's files, as the house tests see them."""

from __future__ import annotations

import ast
import functools
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["CODE", "ROOT", "files", "imports_of", "module_name", "modules", "nodes_of", "project", "python_files"]

ROOT = Path(__file__).resolve().parents[2]
CODE = ("distsim", "debug", "realexec")
"""Top folders of shipped code; distsim/debug and distsim/realexec are links to the other two."""
SKIPPED = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


def project() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def files(*tops: str, root: Path = ROOT) -> Iterator[Path]:
    """Every file under the given top folders, once: links are not followed."""
    for top in tops:
        for folder, subfolders, names in os.walk(root / top):
            here = Path(folder)
            subfolders[:] = sorted(
                name for name in subfolders if name not in SKIPPED and not (here / name).is_symlink()
            )
            yield from (here / name for name in sorted(names) if not name.endswith((".pyc", ".orig")))


def python_files(*tops: str) -> list[Path]:
    """Every .py file under the given top folders."""
    return [path for path in files(*tops) if path.suffix == ".py"]


def module_name(path: Path) -> str:
    """The name the file is imported by: debug/records/call.py is distsim.debug.records.call."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in ("debug", "realexec"):
        parts.insert(0, "distsim")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def modules() -> dict[str, Path]:
    """Every shipped module by name."""
    return {module_name(path): path for path in python_files(*CODE)}


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of the file's syntax tree, parsed and walked once for all tests."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def imports_of(path: Path) -> tuple[tuple[str, int, bool], ...]:
    """(module, line, only for type checkers) of every import in the file, wherever it stands.

    `from a import b` gives `a.b`: b may be a module. A module that `import_module` is given as a string counts.
    """
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    typing_only = {
        id(node)
        for branch in nodes_of(path)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in typing_only
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno, id(node) in typing_only
        elif isinstance(node, ast.Call) and _called(node) == "import_module" and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value, node.lineno, False


def _called(node: ast.Call) -> str:
    """The last part of the name of the function that is called."""
    return getattr(node.func, "attr", None) or getattr(node.func, "id", "")
