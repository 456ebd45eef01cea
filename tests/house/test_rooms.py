"""The rooms of the house: no circle of imports, no crowded folder, no long file, a guide at every door."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import networkx
import pytest

from tests.house.tree import CODE, ROOT, imports_of, modules, python_files

pytestmark = pytest.mark.xdist_group("syntax trees")  # which every process would parse for itself

MOST_ENTRIES = 13
MOST_ATTRIBUTES = 33
"""Attributes that an object of a class sets on itself: `SimProcess` today. More is an owner that is missing."""
SHELL = {
    *("__init__.py", "__main__.py", "py.typed", "pytest_plugin.py", "test.py", "errors.py", "options.py"),
    *("debug", "realexec", "deprecated", "shelves.py", "libraries", "mpi", "planning", "remote_calls"),
}
"""What stands in the top package and is not a sub-package of it: doors (`distsim.deprecated` is that of old
programs), a marker, the exceptions, the links to two packages beside it, and shelves with the registry of them."""
DOORS = {
    *(("distsim.deprecated.launch", "distsim.cli"), ("distsim.cli.dispatch", "distsim.cli.run")),
    ("distsim.cli.functions", "distsim.cli.dispatch"),
}
"""(importer, imported) by name alone: an old launcher starts the command line, as `distsim.run` does, and that starts
its commands."""


def graph() -> networkx.DiGraph[str]:
    """Which module imports which, in whatever place of the file, and be it for types only."""
    known = modules()
    found: networkx.DiGraph[str] = networkx.DiGraph()
    for module, path in known.items():
        for imported, _, _ in imports_of(path):
            target = imported if imported in known else imported.rpartition(".")[0]
            if target in known and target != module and (module, target) not in DOORS:
                found.add_edge(module, target)
    return found


def test_no_import_circle() -> None:
    """A module can be read without those that are built upon it. Imports for types only count."""
    circles = [sorted(circle) for circle in networkx.strongly_connected_components(graph()) if len(circle) > 1]
    assert circles == []


def test_a_planted_circle_is_seen() -> None:
    """The graph has the edges that imports in functions and for types make."""
    edges = graph()
    assert edges.has_edge("distsim.watchdog.process", "distsim.report.fate"), "in a function"
    assert edges.has_edge("distsim.report.document", "distsim.sim.outcome"), "for types"
    edges.add_edge("distsim.sim.outcome", "distsim.report.document")
    assert any(len(circle) > 1 for circle in networkx.strongly_connected_components(edges))


def test_no_crowded_folder() -> None:
    """At most 13 modules and sub-packages in a folder: more is a second level that is missing."""
    entries: dict[Path, set[str]] = defaultdict(set)
    for path in python_files(*CODE):
        if path.name == "__init__.py":
            entries[path.parent.parent].add(path.parent.name)
        else:
            entries[path.parent].add(path.name)
    top = ROOT / "distsim"
    entries[top] -= SHELL
    crowded = {str(f.relative_to(ROOT)): len(names) for f, names in entries.items() if len(names) > MOST_ENTRIES}
    crowded.pop(".", None)
    assert crowded == {}


def test_no_object_holds_everybodys_state() -> None:
    """What belongs together is an object of its own. Tables of plain fields (dataclasses) do not count."""
    crowded = {}
    for path in python_files(*CODE):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                stored = {
                    inner.attr
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and isinstance(inner.value, ast.Name)
                    and inner.value.id == "self"
                }
                if len(stored) > MOST_ATTRIBUTES:
                    crowded[node.name] = len(stored)
    assert crowded == {}


@pytest.mark.parametrize(
    "path",
    [p for p in python_files(*CODE) if p.name == "__init__.py"],
    ids=lambda p: str(p.parent.relative_to(ROOT)),
)
def test_a_guide_at_every_door(path: Path) -> None:
    """Each package says in two lines what it is and where to begin, and lists what is its own to give."""
    tree = ast.parse(path.read_text())
    guide = [line for line in (ast.get_docstring(tree) or "").splitlines() if line.strip()]
    assert len(guide) >= 2, "two lines: what it is, where to begin"
    assert any(isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" for node in tree.body)


def test_no_test_reaches_into_another_packages_private_names() -> None:
    """A test of one package imports or replaces nothing of another that begins with an underscore."""
    wrong = []
    for path in python_files("tests"):
        mine = path.relative_to(ROOT / "tests").parts[0]
        if mine in ("house", "fuzz"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distsim."):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("distsim."):
                names = [node.value.split()[0]] if node.value.strip() else []
            else:
                continue
            for name in names:
                parts = name.split(".")
                if parts[1] != mine and any(p.startswith("_") and not p.startswith("__") for p in parts[1:]):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert wrong == []
