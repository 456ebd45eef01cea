"""ruff and mypy --strict have nothing to say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.house.tree import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "--quiet"], ["ruff", "format", "--check", "--quiet"], ["mypy", "--no-error-summary"]],
    ids=["ruff", "format", "mypy"],
)
def test_the_linter_is_silent(command: list[str]) -> None:
    """One style and strict types, everywhere."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
