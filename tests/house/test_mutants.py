"""The command that changes the code to see whether a test notices."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.benchmarks.mutants import mutants_of, mutated

CHANGES = {
    "a < 3": ["a >= 3", "a <= 3", "a < 4"],
    "a == b": ["a != b"],
    "a in b": ["a not in b"],
    "a + b * c": ["a - b * c", "a + b / c"],
    "a and b": ["a or b"],
    "not a": ["not not a"],
    "-a": ["+a"],
    "min(a, b)": ["max(a, b)"],
    "[1, True]": ["[2, True]", "[1, False]"],
    "a: tuple[1] = b": [],
    "if TYPE_CHECKING:\n    a < b": [],
    "@f(1)\ndef g(): pass": [],
    "zip(a, b, strict=True)": [],
}


@pytest.mark.parametrize("code", CHANGES)
def test_every_change_of_a_line(code: str, tmp_path: Path) -> None:
    """One at a time; none of what does not run, or hardly."""
    path = tmp_path / "code.py"
    path.write_text(code)
    mutants = mutants_of(path)
    assert [ast.unparse(mutated(code, mutant.index)) for mutant in mutants] == CHANGES[code]
