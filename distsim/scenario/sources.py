"""Finds the sources of a program: its file and the modules beside it that it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from distsim.text.untrusted_input import LARGEST_SOURCE, read_bytes

MOST_FILES = 40
"""Largest number of files beside the script that are searched."""


def own_sources(script: Path) -> list[Path]:
    """Return *script* and the modules beside it that it imports, directly or not."""
    return [path for path, _ in parsed_sources(script)]


def parsed_sources(script: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the files of `own_sources` with their syntax trees; files that cannot be parsed are left out."""
    todo, seen = [script], {script}
    while todo and len(seen) <= MOST_FILES:
        path = todo.pop(0)
        try:
            tree = ast.parse(read_bytes(path, LARGEST_SOURCE))
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        yield path, tree
        for module in _imported(tree):
            stem = script.parent / module.replace(".", "/")
            for file in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
                if file not in seen and file.is_file():
                    seen.add(file)
                    todo.append(file)


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
