"""English that a stranger reads at once, as far as a machine can check it.

The ceilings may only shrink: lower one when you have mended some.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections import Counter

import pytest

from tests.house.tree import CODE, ROOT, nodes_of, python_files

pytestmark = pytest.mark.xdist_group("syntax trees")  # which every process would parse for itself

VAGUE = frozenset({"found", "said", "told", "what", "made", "theirs", "asked", "place"})
"""Names that do not say what their value is."""
MOST_VAGUE = 32
"""Variables, arguments, functions and classes with such a name."""
LONGEST_FIRST_LINE = 88
"""Columns in which the first line of a module's docstring says what the module is responsible for."""
MOST_LONG_FIRST_LINES = 222
MOST_TINY_DOCSTRINGS = 32
"""Docstrings of one or two words, which repeat the name or need the code."""
MOST_SHARED_CLASS_NAMES = 4
"""Public class names that several modules define."""


def test_identifiers_say_what_the_value_is() -> None:
    """A reader needs no other line to know what a name holds."""
    uses = Counter(name for path in python_files(*CODE) for name in map(_bound_name, nodes_of(path)) if name in VAGUE)
    assert uses.total() <= MOST_VAGUE, uses


def _bound_name(node: ast.AST) -> str:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
            return name
        case ast.Name(id=name, ctx=ast.Store()):
            return name
    return ""


def test_a_module_says_its_responsibility_in_one_line() -> None:
    """A reader decides by the first line whether to open the file."""
    docs = {path: ast.get_docstring(tree) for path in python_files(*CODE) for tree in _modules_of(nodes_of(path))}
    first = {path: (doc or "").partition("\n\n")[0] for path, doc in docs.items()}
    assert [str(path) for path, doc in first.items() if not doc.rstrip().endswith(".")] == []
    long = [path for path, doc in first.items() if len(doc.partition("\n")[0]) > LONGEST_FIRST_LINE]
    assert len(long) <= MOST_LONG_FIRST_LINES


def _modules_of(nodes: tuple[ast.AST, ...]) -> list[ast.Module]:
    return [node for node in nodes if isinstance(node, ast.Module)]


def test_a_docstring_says_more_than_two_words() -> None:
    """Fewer words than three repeat the name, or are a riddle without the code."""
    tiny = [
        (str(path), node.name)
        for path in python_files(*CODE)
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and len((ast.get_docstring(node) or "a b c").split()) < 3
    ]
    assert len(tiny) <= MOST_TINY_DOCSTRINGS, tiny


def test_a_public_class_name_means_one_class() -> None:
    """A name in a traceback or a search leads to one class."""
    names = Counter(
        node.name
        for path in python_files(*CODE)
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    )
    shared = sorted(name for name, number in names.items() if number > 1)
    assert len(shared) <= MOST_SHARED_CLASS_NAMES, shared


@pytest.mark.skipif(shutil.which("codespell") is None, reason="pip install -e '.[test]'")
def test_words_are_spelled_right() -> None:
    """codespell knows common misspellings only, so what it reports is one."""
    done = subprocess.run(["codespell"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout
