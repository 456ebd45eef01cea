"""Laws of size: what a stranger has to read may only shrink."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.house.budget import code_lines, read, today
from tools.benchmarks.files_entered import LIMITS, walks

pytestmark = pytest.mark.xdist_group("syntax trees")  # which every process would parse for itself

LEEWAY = 1.05
"""How far a budget may lie above what it pays for: more is room in which a package grows unseen."""
LEEWAY_LINES = 60
counts_of_today = functools.cache(today)


@pytest.mark.parametrize("table", ["lines", "functions", "counts"])
def test_nothing_is_above_its_budget(table: str) -> None:
    """Lines of code a package, functions in 100 lines, functions that are called once, private names in tests."""
    budget = read()[table]
    counts = counts_of_today()[table]
    over = {name: (figure, budget.get(name, 0)) for name, figure in counts.items() if figure > budget.get(name, 0)}
    assert over == {}, "take something away, or raise tests/house/budget.toml and give the reason in the commit"


def test_a_budget_follows_what_has_fallen() -> None:
    """`python -m tests.house.budget --lower` writes it."""
    counts = counts_of_today()["lines"]
    loose = {
        name: (counts.get(name, 0), limit)
        for name, limit in read()["lines"].items()
        if limit > max(counts.get(name, 0) * LEEWAY, counts.get(name, 0) + LEEWAY_LINES)
    }
    assert loose == {}, "run python -m tests.house.budget --lower"


def test_docstrings_and_comments_cost_nothing(tmp_path: Path) -> None:
    """A budget of lines must not be met by leaving them out."""
    path = tmp_path / "planted.py"
    path.write_text(
        '"""A\nmodule."""\n\nLIMIT = 1\n"""What it is."""\n# why\ndef f():\n    """It."""\n    return 1  # so\n'
    )
    assert code_lines(path) == 3


@pytest.mark.slow
def test_a_reader_meets_no_more_files() -> None:
    """Files that are entered, or imported, on three walks through the project."""
    met = {walk: len(files) for walk, files in walks().items()}
    assert {walk: count for walk, count in met.items() if count > LIMITS[walk]} == {}
    assert all(met.values())
