"""What a newcomer sees of the suite: a failure at once, and a first look at every part within a minute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

SUITE = """
import pytest

def test_falls():
    assert 1 == 2

@pytest.fixture
def broken():
    raise OSError("gone")

def test_of_broken(broken): ...

@pytest.mark.parametrize("number", range(20))
def test_stands(number): ...
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 2])
def test_a_failure_is_named_when_it_happens(processes: int, tmp_path: Path) -> None:
    """On a line of its own, before the tests that follow; only once, also with xdist."""
    (tmp_path / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    (tmp_path / "test_made.py").write_text(SUITE)
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", str(processes), "--rootdir", "."]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    progress = done.stdout.partition("100%]")[0].splitlines()
    assert [line for line in progress if line.startswith(("FAILED", "ERROR"))] == [
        "FAILED test_made.py::test_falls",
        "ERROR test_made.py::test_of_broken",
    ], done.stdout
    assert done.stdout.count("\nFAILED") == 2, "at once and in the summary"


def test_the_first_look_is_at_every_part() -> None:
    """Simulator, guard on gloo, diagnosis, command line, network."""
    marked = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py") if "mark.smoke" in path.read_text()}
    assert {"sim", "cases", "debug", "cli", "network"} <= marked
