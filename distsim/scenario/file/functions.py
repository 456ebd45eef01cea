"""Checks without running a program whether it has the function that a scenario names."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from distsim.text.untrusted_input import read_bytes

__all__ = ["lacks", "module_source"]

LARGEST_FILE = 16 << 20
_DYNAMIC = {"globals", "vars", "exec", "setattr", "__dict__", "__getattr__"}
"""Names whose use can bind other names dynamically."""


def lacks(source: Path, function: str) -> bool:
    """Return whether *source* certainly binds no *function* at its top level; False if that is not known."""
    try:
        tree = ast.parse(read_bytes(source, LARGEST_FILE))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the run says so, with the line
        return False
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name) if name in _DYNAMIC:
                return False
            case ast.Global(names=names) if function in names:
                return False
    bound = set(_bound(tree))
    return function not in bound and "*" not in bound


def _bound(node: ast.AST) -> Iterator[str]:
    """Return names that *node* binds, outside of functions and classes."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield child.name
                continue
            case ast.Name(ctx=ast.Store()):
                yield child.id
            case ast.alias():
                yield child.asname or child.name.partition(".")[0]
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name
        yield from _bound(child)


def module_source(name: str, folder: Path) -> Path | None:
    """The source of a module that ranks can import beside *folder*; None where there is none to read.
    Nothing is imported, so the packages around it are searched one by one."""
    path = [str(folder.resolve()), *sys.path]
    parts, origin = name.split("."), None
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        origin, path = spec.origin, list(spec.submodule_search_locations or ())
    return Path(origin) if origin is not None and origin.endswith(".py") else None
