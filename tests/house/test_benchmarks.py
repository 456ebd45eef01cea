"""Benchmarks are programs that people start by hand."""

from __future__ import annotations

import ast

from tests.house.tree import ROOT, imports_of, python_files


def test_benchmarks_read_their_arguments_with_argparse() -> None:
    """`--help` says what there is to say, and a wrong word is one line: `int(sys.argv[1])` is a traceback for both."""
    by_hand = []
    for path in python_files("tests/benchmarks"):
        told = ast.parse(path.read_text(encoding="utf-8"))
        reads = any(
            isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == "sys.argv"
            for node in ast.walk(told)
        )
        if reads or ("sys.argv" in _calls(told) and "argparse" not in {name for name, _, _ in imports_of(path)}):
            by_hand.append(str(path.relative_to(ROOT)))
    assert by_hand == []


def _calls(tree: ast.Module) -> set[str]:
    """What is given to functions."""
    return {ast.unparse(given) for node in ast.walk(tree) if isinstance(node, ast.Call) for given in node.args}
