"""Private names of torch are written in distsim/torch_compat alone, where each has its releases and its purpose."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from distsim.torch_compat.names import all_names
from tests.house.tree import CODE, ROOT, nodes_of, python_files

pytestmark = pytest.mark.xdist_group("syntax trees")  # which every process would parse for itself

PRIVATE = re.compile(r"_[A-Za-z]\w*\Z")
DOTTED = re.compile(r"torch(\.\w+)*\.(_[A-Za-z]\w*)(\.\w+)*\Z")
OF_PYTHON = {
    *("_getframe", "_current_frames", "_exit", "_target", "_args", "_bootstrap", "_run_module_as_main", "_Unpickler"),
}
"""Private names of the standard library: sys, os, multiprocessing, threading, runpy, pickle."""
_FOLDERS = (
    "calibration",
    "cli",
    "collectives",
    "deprecated",
    "kernels",
    "libraries",
    "network",
    "plugin",
    "remote_calls",
    "scenario",
)
STILL = tuple(f"distsim/{folder}/" for folder in (*_FOLDERS, "sim"))
"""Folders that write private names of Python's and of their own objects as well: of these only what is reached from
torch is looked at."""
REGISTER = "debug/records/obligations.py"
"""Names torch's functions as programs call them and stacks show them, and calls none."""
MOST_NAMES = 435
"""Four fifths of the 524 that there were when the table was begun, two that the search for silent faults reads,
three of symmetric memory, one of operators that torch's observers miss, two of checkpoints that another process
writes, one of the groups of a mesh, of which 100,000 GPUs have too many, one of the barrier in a store, and two of
what OLMo-core's programs do: draws of DTensors and compiled blocks without checkpoints."""


@functools.cache
def ours(top: str) -> frozenset[str]:
    """Every name that the code under a top folder defines: functions, classes, attributes, parameters."""
    names: set[str] = set()
    for path in python_files(top):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
    return frozenset(names)


def private_names(path: Path, mine: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line and name of every private name in a file that is not among *mine*, nor Python's."""
    yield from _of_imports(path)
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and PRIVATE.match(node.attr):
            if node.attr not in mine | OF_PYTHON:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if DOTTED.match(node.value):
                yield node.lineno, node.value
        elif isinstance(node, ast.Subscript | ast.Call):
            for part in ast.walk(node.slice) if isinstance(node, ast.Subscript) else node.args:
                text = part.value if isinstance(part, ast.Constant) else None
                if isinstance(text, str) and PRIVATE.match(text) and text not in mine | OF_PYTHON:
                    yield node.lineno, text


def rooted_names(nodes: tuple[ast.AST, ...]) -> Iterator[tuple[int, str]]:
    """Line and path of every private name that is reached from an import of torch, as an attribute or as a text."""
    known = dict(_imported(nodes))
    if not known:
        return
    for node in nodes:  # core = torch._C
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and (path := _path(node.value, known))
        ):
            known.setdefault(node.targets[0].id, str(_path(node.value, known)))
    for node in nodes:
        if isinstance(node, ast.Attribute) and PRIVATE.match(node.attr) and (path := _path(node, known)):
            yield node.lineno, path
        elif isinstance(node, ast.Call | ast.Tuple):  # getattr(torch, "_name"), the target of a patch
            parts = node.args if isinstance(node, ast.Call) else node.elts
            text = parts[1].value if len(parts) > 1 and isinstance(parts[1], ast.Constant) else None
            if isinstance(text, str) and PRIVATE.match(text) and (path := _path(parts[0], known)):
                yield node.lineno, f"{path}.{text}"


def _imported(nodes: tuple[ast.AST, ...]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    yield (alias.asname, alias.name) if alias.asname else ("torch", "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _path(node: ast.expr, known: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([known[node.id], *reversed(parts)]) if isinstance(node, ast.Name) and node.id in known else None


def test_no_private_name_is_reached_from_torch() -> None:
    """Nor in the folders that have private names of other kinds."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in python_files(*CODE)
        if not str(path.relative_to(ROOT)).startswith("distsim/torch_compat/")
        for line, name in [*rooted_names(nodes_of(path)), *_of_imports(path)]
    ]
    assert wrong == []


def _of_imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                if any(PRIVATE.match(part) for part in dotted.split(".")):
                    yield node.lineno, dotted
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if DOTTED.match(alias.name))


@pytest.mark.parametrize(
    "text", ["torch._C", "getattr(torch, '_conj')", "[(torch.cuda, '_lazy_init', None)]", "(a := 1, torch._C)[1]"]
)
def test_a_name_reached_from_torch_is_seen(text: str) -> None:
    """As an attribute, as a text for getattr, as the target of a patch."""
    assert list(rooted_names(tuple(ast.walk(ast.parse(f"import torch\n{text}")))))


def test_there_are_fewer_names_than_there_were() -> None:
    """Each says what it is for."""
    names = [name for name in all_names().values() if name.private]
    assert len(names) <= MOST_NAMES
    assert all(name.feature and name.path.startswith("torch.") for name in names)


def test_private_names_of_torch_are_in_one_place() -> None:
    """A release that renames one is mended in one file."""
    wrong = []
    for path in python_files(*CODE):
        place = str(path.relative_to(ROOT))
        if place != REGISTER and not place.startswith(("distsim/torch_compat/", *STILL)):
            mine = ours(place.split("/")[0])
            wrong += [f"{place}:{line} {name}" for line, name in private_names(path, mine)]
    assert wrong == []


def test_the_rule_sees_a_planted_name(tmp_path: Path) -> None:
    """Imports, attributes, strings: each way to write one."""
    path = tmp_path / "planted.py"
    path.write_text(
        "import torch\nfrom torch._C import _private_thing\nfrom torch.futures import Future\n"
        "a = torch._C\nb = getattr(a, '_sure_to_be_torchs')\nc = 'torch.distributed._functional_collectives'\n"
        "d = vars(a)['_also_torchs']\ne = a.__name__\n"
    )
    assert sorted(line for line, _ in private_names(path, frozenset())) == [2, 4, 5, 6, 7]
