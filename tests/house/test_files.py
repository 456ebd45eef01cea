"""The shape of the files."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.house.tree import CODE, ROOT, python_files

MOST_LINES = 600
EVERY_FILE = python_files(*CODE, "tests", "tools")
TEST_FILES = [path for path in python_files("tests") if path.name.startswith("test_")]


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_file_is_longer_than_600_lines() -> None:
    """One noun a file: what grows over 600 lines holds several."""
    lengths = {_id(path): len(path.read_text(encoding="utf-8").splitlines()) for path in EVERY_FILE}
    assert len(lengths) > 20
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_every_test_says_in_one_sentence_what_it_holds() -> None:
    """A test without its sentence cannot be judged when it fails."""
    wrong = []
    for path in TEST_FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                sentence = " ".join((ast.get_docstring(node) or "").split())
                if not sentence.endswith((".", "?", "!")):
                    wrong.append(f"{_id(path)}:{node.lineno} {node.name}: {sentence!r}")
    assert wrong == []


def test_every_module_says_what_it_is() -> None:
    """The first line of a module is its noun."""
    bare = [
        _id(path)
        for path in python_files(*CODE)
        if path.stat().st_size and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert bare == []
