"""Private names of torch are written in distsim/torch_compat alone, where each has its releases and its purpose."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.tree import CODE, ROOT, python_files

pytestmark = pytest.mark.xdist_group("syntax trees")  # which every process would parse for itself

PRIVATE = re.compile(r"_[A-Za-z]\w*\Z")
DOTTED = re.compile(r"torch(\.\w+)*\.(_[A-Za-z]\w*)(\.\w+)*\Z")
OF_PYTHON = {
    *("_getframe", "_current_frames", "_exit", "_target", "_args", "_bootstrap", "_run_module_as_main", "_Unpickler"),
}
"""Private names of the standard library: sys, os, multiprocessing, threading, runpy, pickle."""
STILL = tuple(
    f"distsim/{folder}/"
    for folder in ("calibration", "cli", "collectives", "deprecated", "kernels", "network", "plugin", "scenario", "sim")
)
"""Folders that still write private names of torch by themselves. This list only becomes shorter."""


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def ours(top: str) -> frozenset[str]:
    """Every name that the code under a top folder defines: functions, classes, attributes, parameters."""
    names: set[str] = set()
    for path in python_files(top):
        for node in ast.walk(_tree(path)):
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
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                if any(PRIVATE.match(part) for part in dotted.split(".")):
                    yield node.lineno, dotted
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if DOTTED.match(alias.name):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Attribute) and PRIVATE.match(node.attr):
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


def test_private_names_of_torch_are_in_one_place() -> None:
    """A release that renames one is mended in one file."""
    wrong = []
    for path in python_files(*CODE):
        place = str(path.relative_to(ROOT))
        if not place.startswith(("distsim/torch_compat/", *STILL)):
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
